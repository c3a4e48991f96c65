"""Rows of caches to bytes and back, plainly and exactly: what every kernel is compared with."""

from __future__ import annotations

import itertools
import math

import torch

from metainfer.kernels.reference.dequantise import E2M1_VALUES, decode_e2m1, scales_to_float
from metainfer.ops.formats import (
    FORMATS,
    INDEX_FORMATS,
    LARGEST_CODE,
    IndexFormat,
    RowFormat,
)

E4M3_NAN = 0x7F
E8M0_NAN = 0xFF


def encode_rows(name: str, x_TD: torch.Tensor) -> torch.Tensor:
    """fp32 or bf16 [T, width] -> uint8 [T, row_bytes]."""
    row = FORMATS[name]
    codes, scales = _encode(row, x_TD[:, : row.coded].float())
    bytes_TB = torch.zeros(len(x_TD), row.row_bytes, dtype=torch.uint8, device=x_TD.device)
    bytes_TB[:, : row.code_bytes] = codes
    bytes_TB[:, row.scales_at : row.scales_at + row.scale_bytes] = scales
    plain = x_TD[:, row.coded :].bfloat16().contiguous().view(torch.uint8)
    bytes_TB[:, row.plain_at : row.plain_at + 2 * row.plain] = plain
    return bytes_TB


def decode_rows(name: str, bytes_TB: torch.Tensor) -> torch.Tensor:
    """uint8 [T, row_bytes] -> fp32 [T, width]."""
    row = FORMATS[name]
    codes = bytes_TB[:, : row.code_bytes]
    scales = bytes_TB[:, row.scales_at : row.scales_at + row.scale_bytes]
    plain = bytes_TB[:, row.plain_at : row.plain_at + 2 * row.plain].contiguous()
    return torch.cat([_decode(row, codes, scales), plain.view(torch.bfloat16).float()], dim=-1)


def encode_index(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 or bf16 [..., width], already rotated -> codes uint8 [..., C], scales uint8 [..., S]."""
    return _encode(INDEX_FORMATS[name], x.float())


def decode_index(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., C] and scales [..., S] -> fp32 [..., width]."""
    return _decode(INDEX_FORMATS[name], codes, scales)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The last dimension (a power of two, N) times the Hadamard matrix and N^-0.5, in fp32."""
    width = x.shape[-1]
    y = x.float()
    step = 1
    while step < width:
        low, high = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        step *= 2
    return y * width**-0.5


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> uint8 codes, to nearest, ties to even, saturating; NaN becomes 0x7F."""
    codes = x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), E4M3_NAN, codes)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes -> fp32."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 [..., N] -> uint8 [..., N / 2], to nearest, ties to even, saturating; no NaN."""
    # A number is as far up the list as it has passed borders between neighbours; on a border the
    # even code wins.
    magnitude = x.float().abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
        border = (low + high) / 2
        codes += magnitude >= border if code % 2 else magnitude > border
    codes = codes + 8 * torch.signbit(x).to(torch.uint8)
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return even | (odd << 4)


def power_of_two_scale(amax: torch.Tensor, code: str, floor: float) -> torch.Tensor:
    """fp32 amax >= 0 -> int32 exponents k of the scales 2^k = 2^ceil(log2(max(amax, floor) /
    largest code)). An infinity, and NaN, count as 2^128."""
    fraction, exponent = torch.frexp(amax.float().clamp(min=floor))
    largest, shift = math.frexp(LARGEST_CODE[code])
    scale = exponent - shift + (fraction > largest).int()
    return torch.where(amax.isfinite(), scale, 129 - shift)


def group_scales(
    amax: torch.Tensor, code: str, scale: str, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of blocks by their largest magnitudes.

    Returns:
        value: fp32, one per block, NaN where amax is.
        kept: the same as uint8 bytes, in the last dimension.
    """
    if scale == "e4m3":
        kept = encode_e4m3((amax.float() / 6.0).clamp(2.0**-9, 448.0))
        return decode_e4m3(kept), kept
    exponent = power_of_two_scale(amax, code, floor)
    value = torch.ldexp(torch.ones_like(amax, dtype=torch.float32), exponent)
    value = value.masked_fill(amax.isnan(), torch.nan)
    if scale == "fp32":
        return value, value.contiguous().view(torch.uint8)
    kept = (exponent + 127).to(torch.uint8)
    return value, torch.where(amax.isnan(), E8M0_NAN, kept)


def encode_groups(
    x: torch.Tensor, code: str, block: int, scale: str, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., N] -> codes as bytes and scales as bytes, one scale per block of channels."""
    blocks = x.float().unflatten(-1, (-1, block))
    value, kept = group_scales(blocks.abs().amax(-1), code, scale, floor)
    scaled = torch.where(value.isnan().unsqueeze(-1), 0.0, blocks / value.unsqueeze(-1))
    codes = encode_e4m3(scaled.flatten(-2)) if code == "e4m3" else encode_e2m1(scaled.flatten(-2))
    return codes, kept


def _encode(form: RowFormat | IndexFormat, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return encode_groups(x, form.code, form.block, form.scale, form.floor)


def _decode(
    form: RowFormat | IndexFormat, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    numbers = decode_e4m3(codes) if form.code == "e4m3" else decode_e2m1(codes)
    if form.scale == "e4m3":
        value = decode_e4m3(scales)
    elif form.scale == "fp32":
        value = scales.contiguous().view(torch.float32)
    else:
        value = scales_to_float(scales)
    return (numbers.unflatten(-1, (-1, form.block)) * value.unsqueeze(-1)).flatten(-2)
