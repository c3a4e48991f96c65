"""Inputs for the mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart, ceil_div


def route_learned(
    case: Any, draw: Draw, rows: int, dtype: str = "float32", padded: bool = False
) -> Call:
    """
    Args:
        padded: some rows are padding.
    """
    gate_ED = draw.normal(case.experts, case.width, dtype=dtype, scale=case.width**-0.5)
    x_TD = draw.normal(rows, case.width, dtype=case.dtype)
    padding = draw.integers(0, 2, rows, 1) > 0 if padded else None
    return Call((gate_ED, draw.normal(case.experts, scale=0.5)), (x_TD, padding))


def route_hash(
    case: Any, draw: Draw, rows: int, dtype: str = "float32", padded: bool = False
) -> Call:
    learned = route_learned(case, draw, rows, dtype, padded)
    (gate_ED, _), (x_TD, padding) = learned.weights, learned.arguments
    table_VK = draw.distinct(50, case.selected, case.experts)
    return Call((gate_ED, table_VK), (x_TD, draw.integers(0, 50, rows), padding))


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
    shape = case.experts, rows, columns // 2
    packed = draw.integers(0, 256, *shape, dtype=torch.uint8)
    return packed, draw.scales(case.experts, rows, columns // 32, middle=122)


def experts(
    case: Any,
    draw: Draw,
    rows: int,
    same: bool = False,
    repeated: bool = False,
    empty: bool = False,
    scales: str = "e8m0",
) -> Call:
    """As `experts_fp8_rows`."""
    weights = _three_weights(case, draw, scales)
    x_TD = draw.normal(rows, case.width, dtype=case.dtype)
    return Call(weights, (x_TD, *_chosen(case, draw, rows, same, repeated, empty)))


def _three_weights(case: Any, draw: Draw, scales: str) -> tuple[tuple[torch.Tensor, ...], ...]:
    return (
        _expert_weight(case, draw, case.inner, case.width, scales),
        _expert_weight(case, draw, case.width, case.inner, scales),
        _expert_weight(case, draw, case.inner, case.width, scales),
    )


def _chosen(
    case: Any,
    draw: Draw,
    rows: int,
    same: bool = False,
    repeated: bool = False,
    empty: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids_TK and weights_TK."""
    ids_TK = draw.distinct(rows, case.selected, case.experts)
    if same:
        ids_TK = ids_TK[:1].expand(rows, -1).contiguous()
    if repeated:
        ids_TK[::2, 1] = ids_TK[::2, 0]
    weights_TK = draw.normal(rows, case.selected).abs()
    weights_TK[1:2, 0] = 0.0
    if empty:
        ids_TK[::3] = -1
        ids_TK[1::3, 0] = case.experts
    return ids_TK, weights_TK


def experts_fp8_rows(
    case: Any,
    draw: Draw,
    rows: int,
    same: bool = False,
    repeated: bool = False,
    spread: bool = False,
    empty: bool = False,
    scales: str = "",
    far: int = 0,
) -> Call:
    """
    Args:
        same: all rows choose the same experts.
        repeated: some rows choose an expert twice.
        spread: rows lie apart.
        empty: some rows, and some choices of others, are no expert.
        far: how many powers of two smaller the scales of some groups of a weight are.
    """
    kind = scales or case.scale
    weights = _three_weights(case, draw, kind)
    if far and case.weight_format == "fp4_group":
        for _, scale in weights:
            scale[:, ::3, ::2] -= far
    codes_TD = draw.fp8(rows, case.width)
    codes_TD = (apart(codes_TD) if spread else codes_TD).view(torch.uint8)
    scales_TG = draw.scales(rows, case.width // case.group, middle=120)
    if case.scale == "fp32":
        scales_TG = torch.exp2(scales_TG.float() - 127)
    ids_TK, weights_TK = _chosen(case, draw, rows, same, repeated, empty)
    return Call(weights, (codes_TD, scales_TG, ids_TK, weights_TK))


def swiglu(case: Any, draw: Draw, rows: int) -> Call:
    return Call((), (draw.normal(rows, 2 * case.inner, dtype=case.dtype, scale=2.0),))
