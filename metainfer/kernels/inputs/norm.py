"""Inputs for the norms."""

from __future__ import annotations

from typing import Any

from metainfer.kernels.inputs.base import Call, Draw, apart


def rms_norm(case: Any, draw: Draw, rows: int, dtype: str = "", spread: bool = False) -> Call:
    x_TD = draw.normal(rows, case.width, dtype=dtype or case.dtype, scale=3.0)
    x_TD[: rows // 3] *= 1e-3  # the eps matters here
    return Call((), (apart(x_TD) if spread else x_TD, draw.normal(case.width)))
