"""Inputs for activations as fp8 groups."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart


def fp8(case: Any, draw: Draw, rows: int, spread: bool = False, kind: str = "normal") -> Call:
    """ "wide": numbers of all sizes, whole groups of zeros and of tiny numbers among them."""
    x_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype, scale=3.0)
    if kind == "wide":
        x_THD = widened(draw, x_THD, case.group)
    rotation_TR2 = draw.rotation(rows, case.rope_width) if case.rope_width else None
    return Call((), (apart(x_THD) if spread else x_THD, rotation_TR2))


def widened(draw: Draw, x: torch.Tensor, group: int) -> torch.Tensor:
    """x with a size of its own for each group of channels, from 2^-60 to 2^20, or zero."""
    sizes = torch.exp2(draw.integers(-60, 21, *x.shape[:-1], -(-x.shape[-1] // group)).float())
    sizes = sizes * (draw.integers(0, 8, *sizes.shape) > 0)
    return x * sizes.repeat_interleave(group, -1)[..., : x.shape[-1]].to(x.dtype)
