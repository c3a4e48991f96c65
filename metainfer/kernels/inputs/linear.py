"""Inputs for matrix products."""

from __future__ import annotations

from typing import Any

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
