"""Inputs for the norms."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart


def rms_norm(case: Any, draw: Draw, rows: int, dtype: str = "", spread: bool = False) -> Call:
    x_TD = _rows(case, draw, rows, dtype or case.dtype)
    return Call((), (apart(x_TD) if spread else x_TD, draw.normal(case.width)))


def add_rms_norm(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_TD, residual_TD = (_rows(case, draw, rows, case.dtype) for _ in range(2))
    if spread:
        x_TD, residual_TD = apart(x_TD), apart(residual_TD)
    return Call((), (x_TD, residual_TD, draw.normal(case.width)))


def rms_norm_fp8(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    x_TD, residual_TD, weight_D = add_rms_norm(case, draw, rows, spread).arguments
    return Call((), (x_TD, residual_TD if case.adds else None, weight_D))


def _rows(case: Any, draw: Draw, rows: int, dtype: str) -> torch.Tensor:
    x_TD = draw.normal(rows, case.width, dtype=dtype, scale=3.0)
    x_TD[: rows // 3] *= 1e-3  # the eps matters here
    x_TD[rows - 1 :] = 0.0
    return x_TD
