"""Inputs for the rotary embedding."""

from __future__ import annotations

from typing import Any

from metainfer.kernels.inputs.base import Call, Draw, apart


def rotate(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype)
    return Call((), (apart(x_THD) if spread else x_THD, draw.rotation(rows, case.rope_width)))


def norm_rotate(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_THD, rotation_TR2 = rotate(case, draw, rows, spread).arguments
    weight_D = draw.normal(case.width) if case.weighted else None
    return Call((), (x_THD, weight_D, rotation_TR2))


def layer_norm_rotate(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_TD = draw.normal(rows, case.width, dtype=case.dtype).add_(0.5)
    weight_D, bias_D = draw.normal(case.width), draw.normal(case.width)
    rotation_TR2 = draw.rotation(rows, case.rope_width)
    return Call((), (apart(x_TD) if spread else x_TD, weight_D, bias_D, rotation_TR2))
