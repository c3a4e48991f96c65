"""The RMS norm: one reduction and three passes, in tiles of rows."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.cpu.tiles import is_one_tile, row_tiles
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.ops.norm import RmsNormCase

# Up to here one call costs less than several quick ones.
_FEW_ELEMENTS = 2**14


def inverse_rms(x: torch.Tensor, eps: torch.Tensor | float) -> torch.Tensor:
    """1 / sqrt(mean of squares over the last dimension + eps), fp32 [..., 1]. A tensor for `eps`
    spares making one."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    eps = eps if isinstance(eps, torch.Tensor) else torch.tensor(eps)
    return torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


def normed(x: torch.Tensor, eps: float, weight_D: torch.Tensor | None) -> torch.Tensor:
    """x times its inverse RMS and the weight, new, dense, in fp32."""
    if x.numel() <= _FEW_ELEMENTS:
        return torch.rms_norm(x.float(), x.shape[-1:], weight_D, eps)
    if x.dtype is torch.float32:
        y = x * inverse_rms(x, eps)
    else:
        y = x.float()
        y.mul_(inverse_rms(y, eps))
    return y if weight_D is None else y.mul_(weight_D)


def rms_norm(case: RmsNormCase, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    if is_one_tile(*x_TD.shape):
        return normed(x_TD, case.eps, weight_D).to(TORCH_DTYPES[case.dtype])
    y_TD = torch.empty(x_TD.shape, dtype=TORCH_DTYPES[case.dtype])
    for tile in row_tiles(*x_TD.shape):
        y_TD[tile] = normed(x_TD[tile], case.eps, weight_D)
    return y_TD


BACKENDS = (cpu_backend("norm.rms_norm", rms_norm),)
