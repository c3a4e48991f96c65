"""Quantised weights to numbers of the compute dtype, a piece at a time.

e4m3: its exponent and mantissa, moved to the low exponent and the high mantissa bits of bf16 or
fp32, are the same number but for the bias, 2^-120 times too small; subnormals stay subnormals. So a
code costs a shift, a mask and the product with its scale.
e2m1: four codes are looked up at once, as four bf16 numbers.
All of it is exact in bf16 where scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from metainfer.core.errors import UserError
from metainfer.kernels.reference.dequantise import E2M1_VALUES, scales_to_float

_BIAS = 2.0**120
# By compute dtype: integers of its size, how far e4m3 moves up, and the bits that it then has.
_E4M3_BITS: Mapping[torch.dtype, tuple[torch.dtype, int, int]] = MappingProxyType(
    {
        torch.bfloat16: (torch.int16, 4, 0x87F0 - 2**16),
        torch.float32: (torch.int32, 20, 0x87F00000 - 2**32),
    }
)


def _e2m1_quads() -> torch.Tensor:
    """int64 [65536]: for two bytes, as a signed number + 2^15, four bf16 numbers in their order."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.bfloat16)
    two_bytes = torch.arange(-(2**15), 2**15)
    nibbles = torch.stack([two_bytes >> shift & 15 for shift in (0, 4, 8, 12)], dim=1)
    return values[nibbles].view(torch.int64).flatten()


_E2M1_QUADS = _e2m1_quads()
_E8M0 = scales_to_float(torch.arange(256).to(torch.uint8)).to(torch.bfloat16)


class DenseWeight(NamedTuple):
    """Numbers of the compute dtype."""

    numbers: torch.Tensor

    def of(self, part: int | torch.Tensor) -> DenseWeight:
        """The experts that `part` names."""
        return DenseWeight(_part(self.numbers, part))

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers."""
        return self.numbers


class Fp8Weight(NamedTuple):
    """e4m3 codes whose rows fill their blocks.

    Attributes:
        codes: int8 [..., blocks * rows of a block, I].
        factors: each [..., blocks, 1, I], to be multiplied by one after the other.
    """

    codes: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    def of(self, part: int | torch.Tensor) -> Fp8Weight:
        """The experts that `part` names."""
        return Fp8Weight(_part(self.codes, part), tuple(_part(f, part) for f in self.factors))

    def blocks(self, tile: slice) -> Fp8Weight:
        """Some blocks of rows of a single matrix."""
        rows = len(self.codes) // len(self.factors[0])
        codes = self.codes[tile.start * rows : tile.stop * rows]
        return Fp8Weight(codes, tuple(factor[tile] for factor in self.factors))

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows, as numbers."""
        integer, shift, mask = _E4M3_BITS[dtype]
        bits = self.codes.to(integer).bitwise_left_shift_(shift).bitwise_and_(mask)
        blocks = bits.view(dtype).unflatten(-2, (self.factors[0].shape[-3], -1))
        for factor in self.factors:
            blocks.mul_(factor)
        return blocks.flatten(-3, -2)


def fp8_weight(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Fp8Weight:
    """Brings codes [..., O, I] and scales [..., O / block rows, I / block columns] into the form
    that is quick to unpack. The codes are not copied where their rows fill their blocks."""
    codes = codes.view(torch.int8)
    if bool(((codes & 127) == 127).any()):
        raise UserError(
            "a weight in fp8 holds a code that is not a number",
            hint="the checkpoint is damaged: run `metainfer weights check` on it",
        )
    rows, columns = codes.shape[-2:]
    missing_rows = -rows % block[0]
    if missing_rows:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, missing_rows))
    scale = scales_to_float(scale).unsqueeze(-2)
    # The bias and a scale in one factor, where that is no overflow.
    parts = (
        [scale * _BIAS] if bool((scale < 2**7).all()) else [torch.full_like(scale, _BIAS), scale]
    )
    factors = []
    for part in parts:
        full = part.repeat_interleave(block[1], -1)[..., :columns]
        exact = bool((full.to(dtype) == full).all())
        factors.append(full.to(dtype if exact else torch.float32).contiguous())
    return Fp8Weight(codes, tuple(factors))


class Fp4Weight(NamedTuple):
    """e2m1 codes and their e8m0 scales.

    Attributes:
        packed: uint8 [..., O, I / 2], the even column in the low nibble.
        scale: uint8 [..., O, groups].
    """

    packed: torch.Tensor
    scale: torch.Tensor

    def of(self, part: int | torch.Tensor) -> Fp4Weight:
        """The experts that `part` names."""
        return Fp4Weight(_part(self.packed, part), _part(self.scale, part))

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows, as numbers."""
        quads = self.packed.view(torch.int16).flatten().to(torch.int32).add_(2**15)
        numbers = _E2M1_QUADS.index_select(0, quads).view(torch.bfloat16).to(dtype)
        scale = _E8M0.index_select(0, self.scale.flatten().to(torch.int32)).to(dtype)
        numbers.view(len(scale), -1).mul_(scale.unsqueeze(1))
        return numbers.view(*self.scale.shape[:-1], -1)


def _part(stacked: torch.Tensor, part: int | torch.Tensor) -> torch.Tensor:
    """One of the matrices, or a copy of several."""
    return stacked[part] if isinstance(part, int) else stacked.index_select(0, part)
