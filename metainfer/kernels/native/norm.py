"""The RMS norm and the rotary embedding of few rows."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu import norm as torch_norm
from metainfer.kernels.cpu import rope as torch_rope
from metainfer.kernels.native.backend import FEW_ROWS, Native, is_bf16, require
from metainfer.kernels.native.library import Library
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.norm import RmsNormCase
from metainfer.ops.rope import NormRotateCase, RotateCase


def rms_norm(
    library: Library, case: RmsNormCase, x_TD: torch.Tensor, weight_D: torch.Tensor
) -> torch.Tensor:
    rows, width = x_TD.shape
    if rows > FEW_ROWS:
        return torch_norm.rms_norm(case, x_TD, weight_D)
    y_TD = torch.empty(rows, width, dtype=TORCH_DTYPES[case.dtype])
    require(
        library.rms_norm(
            rows,
            width,
            case.eps,
            x_TD.data_ptr(),
            x_TD.stride(0),
            is_bf16(x_TD),
            weight_D.data_ptr(),
            y_TD.data_ptr(),
            is_bf16(y_TD),
        )
    )
    return y_TD


def rotate(
    library: Library, case: RotateCase, x_THD: torch.Tensor, rotation_TR2: torch.Tensor
) -> torch.Tensor:
    rows, heads, width = x_THD.shape
    if rows > FEW_ROWS:
        return torch_rope.rotate(case, x_THD, rotation_TR2)
    require(
        library.rotate(
            rows,
            heads,
            width,
            case.rope_width,
            x_THD.data_ptr(),
            x_THD.stride(0),
            is_bf16(x_THD),
            rotation_TR2.data_ptr(),
            -1.0 if case.inverse else 1.0,
        )
    )
    return x_THD


def norm_rotate(
    library: Library,
    case: NormRotateCase,
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    rows, heads, width = x_THD.shape
    if rows > FEW_ROWS:
        return torch_rope.norm_rotate(case, x_THD, weight_D, rotation_TR2)
    require(
        library.norm_rotate(
            rows,
            heads,
            width,
            case.rope_width,
            case.eps,
            x_THD.data_ptr(),
            x_THD.stride(0),
            is_bf16(x_THD),
            None if weight_D is None else weight_D.data_ptr(),
            rotation_TR2.data_ptr(),
        )
    )
    return x_THD


def backends(native: Native) -> tuple[Backend, ...]:
    return (
        native.backend("norm.rms_norm", rms_norm),
        native.backend("rope.rotate", rotate, eligible=torch_rope.last_pairs_only),
        native.backend("rope.norm_rotate", norm_rotate),
    )
