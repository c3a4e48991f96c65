"""Quantised weights to fp32, plainly."""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scales_to_float(scale: torch.Tensor) -> torch.Tensor:
    """fp32 scales as they are; uint8 bytes b as 2^(b - 127)."""
    if scale.dtype is not torch.uint8:
        return scale.float()
    power = torch.exp2(scale.double() - 127).float()
    return torch.where(scale == 255, torch.nan, power)


def fp8_block(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """e4m3 codes [..., O, I] times the scale of their block -> fp32 [..., O, I]."""
    rows, columns = codes.shape[-2:]
    full = scales_to_float(scale).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return codes.float() * full[..., :rows, :columns]


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., N / 2], the even channel in the low nibble -> fp32 [..., N]."""
    magnitudes = torch.tensor(E2M1_VALUES, device=packed.device)
    table = torch.cat([magnitudes, -magnitudes])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[codes.long()]


def fp4_group(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e2m1 codes [..., O, I / 2] times the scale of each group of columns -> fp32 [..., O, I]."""
    numbers = decode_e2m1(packed)
    group = numbers.shape[-1] // scale.shape[-1]
    return numbers * scales_to_float(scale).repeat_interleave(group, -1)


def to_float(
    weight_format: str, tensors: tuple[torch.Tensor, ...], block: tuple[int, int]
) -> torch.Tensor:
    """A weight of any format -> fp32."""
    if weight_format == "fp8_block":
        return fp8_block(tensors[0], tensors[1], block)
    if weight_format == "fp4_group":
        return fp4_group(tensors[0], tensors[1])
    return tensors[0].float()
