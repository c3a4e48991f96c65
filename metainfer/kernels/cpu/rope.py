"""The rotary embedding as a product of complex numbers."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend, on_cpu
from metainfer.kernels.cpu.norm import normed
from metainfer.kernels.cpu.tiles import is_one_tile, row_tiles
from metainfer.kernels.registry import Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.rope import NormRotateCase, RotateCase


def angles(rotation_TR2: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """complex64 [T, 1, R / 2]: cos + i sin of each row, for all heads."""
    angle_TR = torch.view_as_complex(rotation_TR2)
    return (angle_TR.conj_physical() if inverse else angle_TR).unsqueeze(1)


def turn(x_THD: torch.Tensor, angle_T1R: torch.Tensor) -> None:
    """Rotates the last channels of x where they are."""
    turned_THR = x_THD[..., x_THD.shape[-1] - 2 * angle_T1R.shape[-1] :]
    if _are_pairs(turned_THR):
        torch.view_as_complex(turned_THR.unflatten(-1, (-1, 2))).mul_(angle_T1R)
        return
    pairs_THR = torch.empty(turned_THR.shape).copy_(turned_THR)
    torch.view_as_complex(pairs_THR.unflatten(-1, (-1, 2))).mul_(angle_T1R)
    turned_THR.copy_(pairs_THR)


def _are_pairs(x: torch.Tensor) -> bool:
    """Whether two channels next to each other are one complex64 in memory."""
    places = (x.storage_offset(), *x.stride()[:-1])
    return x.dtype is torch.float32 and all(place % 2 == 0 for place in places)


def rotate(case: RotateCase, x_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
    angle_T1R = angles(rotation_TR2, case.inverse)
    if is_one_tile(len(x_THD), case.heads * case.rope_width):
        turn(x_THD, angle_T1R)
        return x_THD
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
    if is_one_tile(len(x_THD), case.heads * case.width):
        return _norm_rotate(case, x_THD, weight_D, angle_T1R).to(x_THD.dtype)
    for tile in row_tiles(len(x_THD), case.heads * case.width):
        x_THD[tile] = _norm_rotate(case, x_THD[tile], weight_D, angle_T1R[tile])
    return x_THD


def _norm_rotate(
    case: NormRotateCase,
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    angle_T1R: torch.Tensor,
) -> torch.Tensor:
    """New, in fp32."""
    y_THD = normed(x_THD, case.eps, weight_D)
    turn(y_THD, angle_T1R)
    return y_THD


def last_pairs_only(case: RotateCase, target: Target) -> Verdict:
    """Serves interleaved pairs of the last channels."""
    if case.leading or not case.interleaved:
        return no("rotates interleaved pairs of the last channels alone")
    return on_cpu(case, target)


BACKENDS = (
    cpu_backend("rope.rotate", rotate, eligible=last_pairs_only),
    cpu_backend("rope.norm_rotate", norm_rotate),
)
