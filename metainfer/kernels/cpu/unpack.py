"""Quantised weights to fp32 numbers, a piece at a time, exactly.

Sign, exponent and mantissa of e4m3 and e2m1, moved to their places in fp16, are the same number but
for the bias, a power of two too small; subnormals stay subnormals. So a code costs a product, a
mask and a conversion, which the hardware does; what undoes the bias goes with the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from metainfer.core.errors import UserError
from metainfer.kernels.reference.dequantise import scales_to_float

# What moves a code, sign-extended to 16 bits, to its place in fp16; the bits that are its own then
# (between them lie more sign bits); and by how much the number is too small.
_E4M3_MOVE = torch.tensor(1 << 7, dtype=torch.int16)
_E4M3_MASK = torch.tensor(0xBF80 - (1 << 16), dtype=torch.int16)
_E4M3_BIAS = 2.0**8
_E2M1_MASK = torch.tensor(0x8E00 - (1 << 16), dtype=torch.int16)
_E2M1_BIAS = 2.0**14
_HIGH_MOVE = torch.tensor(1 << 5, dtype=torch.int16)
_LOW_MOVE = torch.tensor(1 << 12, dtype=torch.int16)  # then 3 back, which brings the sign along
_LOW_BACK = torch.tensor(3, dtype=torch.int16)
_DAMAGED = "the checkpoint is damaged: run `metainfer weights check` on it"
_E2M1_SCALES = scales_to_float(torch.arange(256).to(torch.uint8)) * _E2M1_BIAS


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
        raise UserError("a weight in fp8 holds a code that is not a number", hint=_DAMAGED)
    factor = (scales_to_float(scale) * _E4M3_BIAS).unsqueeze(-2)
    if not bool(factor.isfinite().all()):
        raise UserError("a scale of a weight in fp8 is not a number or too large", hint=_DAMAGED)
    rows, columns = codes.shape[-2:]
    missing_rows = -rows % block[0]
    if missing_rows:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, missing_rows))
    return Fp8Weight(codes, factor.repeat_interleave(block[1], -1)[..., :columns].contiguous())


class Fp4Weight(NamedTuple):
    """e2m1 codes and their e8m0 scales.

    Attributes:
        packed: int8 [..., O / 2, I], row o in the low and row O / 2 + o in the high nibble.
        scale: uint8 [..., O, groups].
    """

    packed: torch.Tensor
    scale: torch.Tensor

    def of(self, part: int | torch.Tensor) -> Fp4Weight:
        """The experts that `part` names."""
        return Fp4Weight(_part(self.packed, part), _part(self.scale, part))

    def unpack(self) -> torch.Tensor:
        """All rows, as fp32 numbers."""
        rows, columns = self.packed.shape[-2:]
        bits = torch.empty(*self.packed.shape[:-2], 2, rows, columns, dtype=torch.int16)
        bits.copy_(self.packed.unsqueeze(-3))
        low, high = bits.unbind(-3)
        low.mul_(_LOW_MOVE).bitwise_right_shift_(_LOW_BACK)
        high.mul_(_HIGH_MOVE)
        numbers = bits.bitwise_and_(_E2M1_MASK).view(torch.float16).float()
        scale = _E2M1_SCALES.index_select(0, self.scale.flatten().to(torch.int32))
        numbers.view(len(scale), -1).mul_(scale.unsqueeze(1))
        return numbers.flatten(-3, -2)


def fp4_weight(packed: torch.Tensor, scale: torch.Tensor) -> Fp4Weight:
    """Rearranges the codes of experts [E, O, I / 2], the even column in the low nibble; O even."""
    if bool((scale > 240).any()):
        raise UserError("a scale of a weight in fp4 is not a number or too large", hint=_DAMAGED)
    experts, rows, pairs = packed.shape
    halves = torch.empty(experts, rows // 2, 2 * pairs, dtype=torch.uint8)
    for of_expert, result in zip(packed, halves, strict=True):
        codes = torch.stack([of_expert & 15, of_expert >> 4], dim=-1).flatten(-2)
        low, high = codes.chunk(2)
        torch.bitwise_or(low, high << 4, out=result)
    return Fp4Weight(halves.view(torch.int8), scale)


def _part(stacked: torch.Tensor, part: int | torch.Tensor) -> torch.Tensor:
    """One of the matrices, or a copy of several."""
    return stacked[part] if isinstance(part, int) else stacked.index_select(0, part)
