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
_E4M3_MOVE = torch.tensor([1 << 7], dtype=torch.int16)  # not a scalar: that would stay int8
_E4M3_MASK = torch.tensor(0xBF80 - (1 << 16), dtype=torch.int16)
_E4M3_BIAS = 2.0**8
_E2M1_MASK = torch.tensor(0x8E00 - (1 << 16), dtype=torch.int16)
_E2M1_BIAS_BITS = 14
_HIGH_MOVE = torch.tensor(1 << 5, dtype=torch.int16)
_LOW_MOVE = torch.tensor(1 << 12, dtype=torch.int16)  # then 3 back, which brings the sign along
_LOW_BACK = torch.tensor(3, dtype=torch.int16)
# What fp32 has below its exponent.
_FP32_MANTISSA_BITS = 23
_E8M0_MOST = 254 - _E2M1_BIAS_BITS
_DAMAGED = "the checkpoint is damaged: run `metainfer weights check` on it"


class Fp8Weight(NamedTuple):
    """e4m3 codes in whole blocks of rows.

    Attributes:
        codes: int8 [..., blocks, rows of a block, I].
        factor: fp32 [..., blocks, 1, I], what `unscaled` numbers are to be multiplied by.
    """

    codes: torch.Tensor
    factor: torch.Tensor

    def of(self, part: int | slice | torch.Tensor) -> Fp8Weight:
        """The blocks of a matrix, or the experts, that `part` names."""
        return Fp8Weight(_part(self.codes, part), _part(self.factor, part))

    def unscaled(self) -> torch.Tensor:
        """fp32 [..., blocks, rows of a block, I]: the numbers without their factors."""
        bits = torch.mul(self.codes, _E4M3_MOVE).bitwise_and_(_E4M3_MASK)
        return bits.view(torch.float16).float()

    def unpack(self) -> torch.Tensor:
        """fp32 [..., O, I], O with the rows that fill the last block."""
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
    factor = factor.repeat_interleave(block[1], -1)[..., :columns]
    return Fp8Weight(codes.unflatten(-2, (-1, block[0])), factor.contiguous())


class Fp4Weights(NamedTuple):
    """e2m1 codes of experts, each expert's matrices in one row, and their e8m0 scales.

    Attributes:
        packed: int8 [E, N / 2], number n in the low and number N / 2 + n in the high nibble.
        scale: uint8 [E, groups of numbers].
    """

    packed: torch.Tensor
    scale: torch.Tensor

    def of(self, part: int | torch.Tensor) -> Fp4Weights:
        """The experts that `part` names."""
        return Fp4Weights(_part(self.packed, part), _part(self.scale, part))

    def unpack(self) -> torch.Tensor:
        """fp32 [..., N]."""
        bits = torch.empty(*self.packed.shape[:-1], 2, self.packed.shape[-1], dtype=torch.int16)
        bits.copy_(self.packed.unsqueeze(-2))
        low, high = bits.unbind(-2)
        low.mul_(_LOW_MOVE).bitwise_right_shift_(_LOW_BACK)
        high.mul_(_HIGH_MOVE)
        numbers = bits.bitwise_and_(_E2M1_MASK).view(torch.float16).float()
        exponent = self.scale.to(torch.int32).add_(_E2M1_BIAS_BITS)
        scale = exponent.bitwise_left_shift_(_FP32_MANTISSA_BITS).view(torch.float32)
        numbers.view(scale.numel(), -1).mul_(scale.view(-1, 1))
        return numbers.flatten(-2)


def fp4_weights(packed: tuple[torch.Tensor, ...], scales: tuple[torch.Tensor, ...]) -> Fp4Weights:
    """Joins and rearranges matrices [E, O, I / 2], the even column in the low nibble, with scales
    [E, O, groups]."""
    scale = torch.cat([scale.flatten(1) for scale in scales], dim=1)
    if bool((scale > _E8M0_MOST).any()):
        raise UserError("a scale of a weight in fp4 is not a number or too large", hint=_DAMAGED)
    experts, count = len(scale), sum(matrix[0].numel() for matrix in packed)
    halves = torch.empty(experts, count, dtype=torch.uint8)
    for expert, result in enumerate(halves):
        codes = torch.cat([matrix[expert].flatten() for matrix in packed])
        low, high = torch.stack([codes & 15, codes >> 4], dim=1).flatten().chunk(2)
        torch.bitwise_or(low, high << 4, out=result)
    return Fp4Weights(halves.view(torch.int8), scale)


def _part(stacked: torch.Tensor, part: int | slice | torch.Tensor) -> torch.Tensor:
    """One of the matrices or a slice of them, or a copy of several."""
    if isinstance(part, torch.Tensor):
        return stacked.index_select(0, part)
    return stacked[part]
