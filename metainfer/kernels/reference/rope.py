"""The rotary embedding, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.norm import rms
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.rope import NormRotateCase, RotateCase


def rotated(x_THD: torch.Tensor, rotation_TR2: torch.Tensor, inverse: bool) -> torch.Tensor:
    """fp32 copy of x with its last R channels rotated, R / 2 pairs by R / 2 angles."""
    channels = 2 * rotation_TR2.shape[1]
    kept, turned = x_THD.float().split([x_THD.shape[-1] - channels, channels], dim=-1)
    cos, sin = rotation_TR2.unsqueeze(1).unbind(-1)
    if inverse:
        sin = -sin
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([kept, pairs.flatten(-2)], dim=-1)


def rotate(case: RotateCase, x_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
    return x_THD.copy_(rotated(x_THD, rotation_TR2, case.inverse))


def norm_rotate(
    case: NormRotateCase,
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    normed = rms(x_THD, case.eps)
    if weight_D is not None:
        normed = normed * weight_D
    # The norm rounds as `norm.rms_norm` does; the rotation rounds once more.
    return rotated(normed.to(x_THD.dtype), rotation_TR2, inverse=False).to(x_THD.dtype)


BACKENDS = (
    Backend("rope.rotate", REFERENCE, rotate),
    Backend("rope.norm_rotate", REFERENCE, norm_rotate),
)
