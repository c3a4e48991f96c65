"""The rotary embedding as a product of complex numbers."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.cpu.norm import normed
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.ops.rope import NormRotateCase, RotateCase


def angles(rotation_TR2: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """complex64 [T, 1, R / 2]: cos + i sin of each row, for all heads."""
    angle_TR = torch.view_as_complex(rotation_TR2)
    return (angle_TR.conj_physical() if inverse else angle_TR).unsqueeze(1)


def turn(x_THD: torch.Tensor, angle_T1R: torch.Tensor) -> None:
    """Rotates the last channels of x where they are."""
    turned_THR = x_THD[..., x_THD.shape[-1] - 2 * angle_T1R.shape[-1] :]
    # A copy of its own: complex views need pairs that lie dense in fp32.
    pairs = torch.empty(turned_THR.shape).copy_(turned_THR).unflatten(-1, (-1, 2))
    torch.view_as_complex(pairs).mul_(angle_T1R)
    turned_THR.copy_(pairs.flatten(-2))


def rotate(case: RotateCase, x_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
    angle_T1R = angles(rotation_TR2, case.inverse)
    for tile in row_tiles(len(x_THD), case.heads * case.rope_width):
        turn(x_THD[tile], angle_T1R[tile])
    return x_THD


def norm_rotate(
    case: NormRotateCase,
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    angle_T1R = angles(rotation_TR2)
    for tile in row_tiles(len(x_THD), case.heads * case.width):
        y_THD = normed(x_THD[tile], case.eps)
        if weight_D is not None:
            y_THD.mul_(weight_D)
        turn(y_THD, angle_T1R[tile])
        x_THD[tile] = y_THD
    return x_THD


BACKENDS = (
    cpu_backend("rope.rotate", rotate),
    cpu_backend("rope.norm_rotate", norm_rotate),
)
