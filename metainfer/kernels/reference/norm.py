"""The RMS norm, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.norm import RmsNormCase


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean of squares over the last dimension + eps), in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(case: RmsNormCase, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return (rms(x_TD, case.eps) * weight_D).to(TORCH_DTYPES[case.dtype])


BACKENDS = (Backend("norm.rms_norm", REFERENCE, rms_norm),)
