"""The RMS norm: one reduction and three passes, in tiles of rows."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.ops.norm import RmsNormCase


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares over the last dimension + eps), fp32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x times its inverse RMS, new, in fp32."""
    if x.dtype is torch.float32:
        return x * inverse_rms(x, eps)
    x = x.float()
    return x.mul_(inverse_rms(x, eps))


def rms_norm(case: RmsNormCase, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    y_TD = torch.empty(x_TD.shape, dtype=TORCH_DTYPES[case.dtype])
    for tile in row_tiles(*x_TD.shape):
        y_TD[tile] = normed(x_TD[tile], case.eps).mul_(weight_D)
    return y_TD


BACKENDS = (cpu_backend("norm.rms_norm", rms_norm),)
