"""Fp4GroupWeight: e2m1 codes, two to a byte, with one e8m0 scale per 32 columns of a row.

Even columns lie in the low nibble, odd ones in the high nibble. A code's low three bits choose the
magnitude (0, .5, 1, 1.5, 2, 3, 4, 6), bit 3 is the sign. Format of the released V4 experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metainfer.weights.formats.scales import covering_e8m0, decode_e8m0

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LARGEST = 6.0
GROUP = 32


@dataclass(frozen=True, slots=True)
class Fp4GroupWeight:
    """A quantised matrix [O, I], or a stack of them with a leading dimension E.

    Attributes:
        packed_OI2: uint8 [..., O, I / 2].
        scale_OG: uint8 (e8m0 bytes) [..., O, I / 32].
    """

    packed_OI2: torch.Tensor
    scale_OG: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed_OI2.shape[:-1], 2 * self.packed_OI2.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.packed_OI2.nbytes + self.scale_OG.nbytes

    def expert(self, index: int) -> Fp4GroupWeight:
        """One matrix of a stack, sharing its memory."""
        return Fp4GroupWeight(self.packed_OI2[index], self.scale_OG[index])

    def to(self, device: torch.device | str) -> Fp4GroupWeight:
        return Fp4GroupWeight(self.packed_OI2.to(device), self.scale_OG.to(device))

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """[..., O, I] in `dtype`; exact in fp32 and bf16."""
        # bf16 has fp32's exponent range, and a code needs two significant bits.
        exact = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
        values = unpack_e2m1(self.packed_OI2, exact)
        scale = decode_e8m0(self.scale_OG).to(exact)
        values.unflatten(-1, (-1, GROUP)).mul_(scale.unsqueeze(-1))
        return values.to(dtype)


def unpack_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., I / 2] -> the codes' values [..., I] in bf16 or fp32, without scales."""
    # One table look-up per byte gives both values, read as one integer of twice the width.
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=dtype, device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    pair_dtype = torch.int32 if dtype is torch.bfloat16 else torch.int64
    table = pairs.view(pair_dtype).squeeze(-1)
    chosen = table.index_select(0, packed.reshape(-1).to(torch.int32))
    return chosen.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_fp4_group(weight_OI: torch.Tensor) -> Fp4GroupWeight:
    """Nearest e2m1 codes (ties to even) of a finite matrix [O, I], I a multiple of 32, with e8m0
    scales 2^ceil(log2(amax / 6)) per 32 columns of a row."""
    groups_OGC = weight_OI.to(torch.float32).unflatten(-1, (-1, GROUP))
    scale_OG = covering_e8m0(groups_OGC.abs().amax(-1), E2M1_LARGEST)
    scaled = groups_OGC * decode_e8m0(scale_OG).reciprocal().unsqueeze(-1)
    return Fp4GroupWeight(pack_e2m1(scaled.flatten(-2)), scale_OG)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 codes (ties to the even code) of fp32 [..., I], I even -> uint8 [..., I / 2]."""
    magnitude = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for step in range(len(E2M1_MAGNITUDES) - 1):
        midpoint = (E2M1_MAGNITUDES[step] + E2M1_MAGNITUDES[step + 1]) / 2
        # At a midpoint the even code wins: the upper one where the lower is odd.
        codes += magnitude >= midpoint if step % 2 else magnitude > midpoint
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
