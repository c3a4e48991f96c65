"""The norms, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.quantise import fp8_groups
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.norm import AddRmsNormCase, RmsNormCase, RmsNormFp8Case


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean of squares over the last dimension + eps), in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def layer_normed(
    x: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """The layer norm over the last dimension, in fp32."""
    x = x.float()
    x = x - x.mean(-1, keepdim=True)
    return rms(x, eps) * weight_D + bias_D


def rms_norm(case: RmsNormCase, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return (rms(x_TD, case.eps) * weight_D).to(TORCH_DTYPES[case.dtype])


def add_rms_norm(
    case: AddRmsNormCase | RmsNormFp8Case,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = TORCH_DTYPES[case.dtype]
    sum_TD = (residual_TD.float() + x_TD.float()).to(dtype)
    return sum_TD, (rms(sum_TD, case.eps) * weight_D).to(dtype)


def rms_norm_fp8(
    case: RmsNormFp8Case,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    if residual_TD is None:
        sum_TD, y_TD = None, (rms(x_TD, case.eps) * weight_D).to(TORCH_DTYPES[case.dtype])
    else:
        sum_TD, y_TD = add_rms_norm(case, x_TD, residual_TD, weight_D)
    results = (*fp8_groups(y_TD, case.group, case.scale), y_TD if case.normed else None, sum_TD)
    return tuple(result for result in results if result is not None)


BACKENDS = (
    Backend("norm.rms_norm", REFERENCE, rms_norm),
    Backend("norm.add_rms_norm", REFERENCE, add_rms_norm),
    Backend("norm.rms_norm_fp8", REFERENCE, rms_norm_fp8),
)
