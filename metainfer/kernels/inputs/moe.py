"""Inputs for the mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, ceil_div


def route_learned(case: Any, draw: Draw, rows: int, dtype: str = "float32") -> Call:
    gate_ED = draw.normal(case.experts, case.width, dtype=dtype, scale=case.width**-0.5)
    x_TD = draw.normal(rows, case.width, dtype=case.dtype)
    return Call((gate_ED, draw.normal(case.experts, scale=0.5)), (x_TD,))


def route_hash(case: Any, draw: Draw, rows: int, dtype: str = "float32") -> Call:
    (gate_ED, _), (x_TD,) = (c := route_learned(case, draw, rows, dtype)).weights, c.arguments
    table_VK = draw.distinct(50, case.selected, case.experts)
    return Call((gate_ED, table_VK), (x_TD, draw.integers(0, 50, rows)))


def _expert_weight(
    case: Any, draw: Draw, rows: int, columns: int, scales: str
) -> tuple[torch.Tensor, ...]:
    if case.weight_format == "dense":
        weight = draw.normal(case.experts, rows, columns, dtype=case.dtype, scale=columns**-0.5)
        return (weight,)
    if case.weight_format == "fp8_block":
        blocks = ceil_div(rows, case.block[0]), ceil_div(columns, case.block[1])
        scale = draw.scales(case.experts, *blocks, kind=scales, middle=117)
        return draw.fp8(case.experts, rows, columns), scale
    packed = draw.integers(0, 256, case.experts, rows, columns // 2).to(torch.uint8)
    return packed, draw.scales(case.experts, rows, columns // 32, middle=122)


def experts(
    case: Any,
    draw: Draw,
    rows: int,
    same: bool = False,
    repeated: bool = False,
    scales: str = "e8m0",
) -> Call:
    weights = (
        _expert_weight(case, draw, case.inner, case.width, scales),
        _expert_weight(case, draw, case.width, case.inner, scales),
        _expert_weight(case, draw, case.inner, case.width, scales),
    )
    x_TD = draw.normal(rows, case.width, dtype=case.dtype)
    ids_TK = draw.distinct(rows, case.selected, case.experts)
    if same:
        ids_TK = ids_TK[:1].expand(rows, -1).contiguous()
    if repeated:
        ids_TK[::2, 1] = ids_TK[::2, 0]
    weights_TK = draw.normal(rows, case.selected).abs()
    weights_TK[1:2, 0] = 0.0
    return Call(weights, (x_TD, ids_TK, weights_TK))


def swiglu(case: Any, draw: Draw, rows: int) -> Call:
    return Call((), (draw.normal(rows, 2 * case.inner, dtype=case.dtype, scale=2.0),))
