"""Inputs for matrix products."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart, ceil_div


def dense(case: Any, draw: Draw, rows: int, dtype: str = "", spread: bool = False) -> Call:
    weight_OI = draw.normal(case.rows, case.columns, dtype=dtype or case.dtype)
    x_TI = draw.normal(rows, case.columns, dtype=case.dtype)
    return Call((weight_OI,), (apart(x_TI) if spread else x_TI,))


def quantised(case: Any, draw: Draw, rows: int, columns: int, scales: str) -> tuple[Any, ...]:
    blocks = ceil_div(rows, case.block[0]), ceil_div(columns, case.block[1])
    return draw.fp8(rows, columns), draw.scales(*blocks, kind=scales)


def fp8_block(case: Any, draw: Draw, rows: int, scales: str = "e8m0", spread: bool = False) -> Call:
    weights = quantised(case, draw, case.rows, case.columns, scales)
    x_TI = draw.normal(rows, case.columns, dtype=case.dtype)
    return Call(weights, (apart(x_TI) if spread else x_TI,))


def grouped(case: Any, draw: Draw, rows: int, scales: str = "e8m0", dtype: str = "") -> Call:
    outputs = case.groups * case.rows
    x_TGI = draw.normal(rows, case.groups, case.columns, dtype=case.dtype)
    if case.weight_format == "fp8_block":
        return Call(quantised(case, draw, outputs, case.columns, scales), (x_TGI,))
    return Call((draw.normal(outputs, case.columns, dtype=dtype or case.dtype),), (x_TGI,))


def fp8_rows(case: Any, draw: Draw, rows: int, scales: str = "e8m0", spread: bool = False) -> Call:
    weights = quantised(case, draw, case.rows, case.columns, scales)
    return Call(weights, _coded(case, draw, rows, case.columns, spread))


def grouped_fp8_rows(
    case: Any, draw: Draw, rows: int, scales: str = "e8m0", spread: bool = False
) -> Call:
    weights = quantised(case, draw, case.groups * case.rows, case.columns, scales)
    return Call(weights, _coded(case, draw, rows, case.groups * case.columns, spread))


def _coded(case: Any, draw: Draw, rows: int, width: int, spread: bool) -> tuple[Any, Any]:
    """Rows in fp8 groups."""
    codes_TI = draw.fp8(rows, width).view(torch.uint8)
    scales_TG = draw.scales(rows, ceil_div(width, case.group), kind=case.scale)
    if not spread:
        return codes_TI, scales_TG
    return _between(codes_TI, 0x7F, 16), _between(scales_TG, 255, 3)


def _between(dense: torch.Tensor, filler: int, gap: int) -> torch.Tensor:
    """The same numbers with others between the rows."""
    full = torch.full((len(dense), gap), filler, dtype=dense.dtype, device=dense.device)
    return torch.cat([full, dense, full], dim=1)[:, gap:-gap]
