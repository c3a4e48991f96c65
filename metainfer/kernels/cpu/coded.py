"""Coded rows of caches, index keys and queries as fp32 numbers: codes are looked up in tables.

Shape suffix: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from metainfer.kernels.cpu.tiles import is_one_tile, row_tiles
from metainfer.kernels.reference.dequantise import decode_e2m1, scales_to_float
from metainfer.kernels.reference.formats import decode_e4m3
from metainfer.ops.formats import FORMATS, INDEX_FORMATS, IndexFormat, RowFormat

_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# The numbers that a byte stands for: one in e4m3, two in e2m1.
_NUMBERS: Mapping[str, torch.Tensor] = MappingProxyType(
    {"e4m3": decode_e4m3(_BYTES).unsqueeze(1), "e2m1": decode_e2m1(_BYTES.unsqueeze(1))}
)
_SCALES: Mapping[str, torch.Tensor] = MappingProxyType(
    {"e4m3": decode_e4m3(_BYTES), "e8m0": scales_to_float(_BYTES)}
)


def row_numbers(
    name: str, bytes_NB: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """uint8 [N, row_bytes] of a row format -> [N, width]."""
    form, rows = FORMATS[name], len(bytes_NB)
    if is_one_tile(rows, form.width):
        return _row_numbers(form, bytes_NB).to(dtype)
    numbers = torch.empty(rows, form.width, dtype=dtype)
    for tile in row_tiles(rows, form.width):
        numbers[tile] = _row_numbers(form, bytes_NB[tile])
    return numbers


def _row_numbers(form: RowFormat, bytes_NB: torch.Tensor) -> torch.Tensor:
    """fp32 [N, width]."""
    codes = bytes_NB[:, : form.code_bytes]
    scales = bytes_NB[:, form.scales_at : form.scales_at + form.scale_bytes]
    numbers = _scaled(form, codes, scales).view(-1, form.coded)
    if not form.plain:
        return numbers
    plain = bytes_NB[:, form.plain_at : form.plain_at + 2 * form.plain].contiguous()
    return torch.cat([numbers, plain.view(torch.bfloat16).float()], dim=1)


def key_numbers(name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., C] and scales uint8 [..., S] of an index format -> fp32 [..., width]."""
    form = INDEX_FORMATS[name]
    return _scaled(form, codes, scales).view(*codes.shape[:-1], form.width)


def _scaled(
    form: RowFormat | IndexFormat, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """fp32 [scales, channels of a block]."""
    numbers = _NUMBERS[form.code].index_select(0, codes.flatten().int())
    if form.scale == "fp32":
        scale = scales.contiguous().view(torch.float32)
    else:
        scale = _SCALES[form.scale].index_select(0, scales.flatten().int())
    return numbers.view(-1, form.block).mul_(scale.view(-1, 1))
