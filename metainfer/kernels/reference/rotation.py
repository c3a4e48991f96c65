"""The rotation of pairs of channels, plainly."""

from __future__ import annotations

import torch


def rotated(
    x_THD: torch.Tensor,
    rotation_TR2: torch.Tensor,
    inverse: bool,
    interleaved: bool = True,
    leading: bool = False,
) -> torch.Tensor:
    """fp32 copy of x with R of its channels rotated, R / 2 pairs by R / 2 angles: its last
    channels, or its first."""
    channels = 2 * rotation_TR2.shape[1]
    first = 0 if leading else x_THD.shape[-1] - channels
    y_THD = x_THD.float().clone()
    turned = y_THD[..., first : first + channels]
    cos, sin = rotation_TR2.unsqueeze(1).unbind(-1)
    if inverse:
        sin = -sin
    pair = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    one, other = (part.clone() for part in pair.unbind(-1 if interleaved else -2))
    turns = [one * cos - other * sin, other * cos + one * sin]
    turned.copy_(torch.stack(turns, dim=-1 if interleaved else -2).flatten(-2))
    return y_THD
