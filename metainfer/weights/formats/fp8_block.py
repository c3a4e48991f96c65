"""Fp8BlockWeight: e4m3 codes with one scale per block of rows x columns.

weight[i, j] = codes[i, j] * scale[i // rows, j // columns]. Blocks at the lower and right edge may
be cut off. Format of the released DeepSeek-V3 and V4 linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metainfer.weights.formats.scales import covering_e8m0, decode_e8m0, scale_to_float

E4M3_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight:
    """A quantised matrix [O, I], or a stack of them with a leading dimension E.

    Attributes:
        codes_OI: float8_e4m3fn [..., O, I].
        scale: uint8 (e8m0 bytes) or fp32 [..., ceil(O / rows), ceil(I / columns)].
        block: (rows, columns) that share a scale.
    """

    codes_OI: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes_OI.shape)

    @property
    def nbytes(self) -> int:
        return self.codes_OI.nbytes + self.scale.nbytes

    def expert(self, index: int) -> Fp8BlockWeight:
        """One matrix of a stack, sharing its memory."""
        return Fp8BlockWeight(self.codes_OI[index], self.scale[index], self.block)

    def to(self, device: torch.device | str) -> Fp8BlockWeight:
        return Fp8BlockWeight(self.codes_OI.to(device), self.scale.to(device), self.block)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """[..., O, I] in `dtype`: computed in fp32, so exact for e8m0 scales in fp32 and bf16."""
        values = self.codes_OI.to(torch.float32)
        _multiply_blocks(values, scale_to_float(self.scale), self.block)
        return values.to(dtype)


def encode_fp8_block(
    weight_OI: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> Fp8BlockWeight:
    """Nearest e4m3 codes of a finite matrix [O, I] (any float dtype), with e8m0 scales
    2^ceil(log2(amax / 448)) per block."""
    values = weight_OI.to(torch.float32, copy=True)
    scale = covering_e8m0(_block_amax(values, block), E4M3_LARGEST)
    _multiply_blocks(values, decode_e8m0(scale).reciprocal(), block)
    # Blocks whose scale was clamped to the smallest one hold less than one code step anyway.
    codes = values.clamp_(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return Fp8BlockWeight(codes, scale, block)


def _block_amax(values_OI: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block, [ceil(O / rows), ceil(I / columns)]."""
    rows, columns = values_OI.shape
    padding = (0, -columns % block[1], 0, -rows % block[0])
    padded = torch.nn.functional.pad(values_OI.abs(), padding)
    return padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))


def _multiply_blocks(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    """values [..., O, I] *= each block's scale, in place."""
    rows, columns = values.shape[-2:]
    if rows % block[0] == 0 and columns % block[1] == 0:
        blocks = values.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
        blocks.mul_(scale[..., :, None, :, None])
        return
    row_scale = scale.repeat_interleave(block[1], -1)[..., :columns]
    values.mul_(row_scale.repeat_interleave(block[0], -2)[..., :rows, :])
