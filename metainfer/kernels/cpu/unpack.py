"""Quantised weights to fp32 numbers, a piece at a time, exactly.

e4m3: sign, exponent and mantissa, moved to their places in fp16, are the same number but for the
bias, 2^-8 times too small; subnormals stay subnormals. So a code costs a product, a mask and a
conversion, which the hardware does, and the factor that undoes the bias goes with the scale.
e2m1: the two codes of a byte are looked up at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from metainfer.core.errors import UserError
from metainfer.kernels.reference.dequantise import E2M1_VALUES, scales_to_float

_FP16_BIAS = 2.0**8
# By how much e4m3 moves up in fp16, and the bits that are its own then; sign bits lie between.
_E4M3_MOVE = torch.tensor(1 << 7, dtype=torch.int16)
_E4M3_MASK = torch.tensor(0xBF80 - (1 << 16), dtype=torch.int16)


def _e2m1_pairs() -> torch.Tensor:
    """int64 [256]: two fp32 numbers for each byte, the low nibble first."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    bytes_ = torch.arange(256)
    return values[torch.stack([bytes_ & 15, bytes_ >> 4], dim=1)].view(torch.int64).flatten()


_E2M1_PAIRS = _e2m1_pairs()
_E8M0 = scales_to_float(torch.arange(256).to(torch.uint8))


class DenseWeight(NamedTuple):
    """Numbers of the compute dtype."""

    numbers: torch.Tensor

    def of(self, part: int | torch.Tensor) -> DenseWeight:
        """The experts that `part` names."""
        return DenseWeight(_part(self.numbers, part))

    def unpack(self) -> torch.Tensor:
        """The numbers, as they are."""
        return self.numbers


class Fp8Weight(NamedTuple):
    """e4m3 codes whose rows fill their blocks.

    Attributes:
        codes: int8 [..., blocks * rows of a block, I].
        factor: fp32 [..., blocks, 1, I], what `unscaled` numbers are to be multiplied by.
    """

    codes: torch.Tensor
    factor: torch.Tensor

    def of(self, part: int | torch.Tensor) -> Fp8Weight:
        """The experts that `part` names."""
        return Fp8Weight(_part(self.codes, part), _part(self.factor, part))

    def blocks(self, tile: slice) -> Fp8Weight:
        """Some blocks of rows of a single matrix."""
        rows = len(self.codes) // len(self.factor)
        return Fp8Weight(self.codes[tile.start * rows : tile.stop * rows], self.factor[tile])

    def unscaled(self) -> torch.Tensor:
        """fp32 [..., blocks, rows of a block, I]: the numbers without their factors."""
        bits = self.codes.to(torch.int16).mul_(_E4M3_MOVE).bitwise_and_(_E4M3_MASK)
        return bits.view(torch.float16).float().unflatten(-2, (self.factor.shape[-3], -1))

    def unpack(self) -> torch.Tensor:
        """All rows, as fp32 numbers."""
        return self.unscaled().mul_(self.factor).flatten(-3, -2)


def fp8_weight(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> Fp8Weight:
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
    factor = (scales_to_float(scale) * _FP16_BIAS).unsqueeze(-2)
    return Fp8Weight(codes, factor.repeat_interleave(block[1], -1)[..., :columns].contiguous())


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

    def unpack(self) -> torch.Tensor:
        """All rows, as fp32 numbers."""
        pairs = _E2M1_PAIRS.index_select(0, self.packed.flatten().to(torch.int32))
        scale = _E8M0.index_select(0, self.scale.flatten().to(torch.int32))
        numbers = pairs.view(torch.float32).view(len(scale), -1).mul_(scale.unsqueeze(1))
        return numbers.view(*self.scale.shape[:-1], -1)


def _part(stacked: torch.Tensor, part: int | torch.Tensor) -> torch.Tensor:
    """One of the matrices, or a copy of several."""
    return stacked[part] if isinstance(part, int) else stacked.index_select(0, part)
