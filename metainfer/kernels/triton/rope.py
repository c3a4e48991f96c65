"""The rotary embedding, alone and after the norm of each head or key, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.rows import angles, prepared, refused_halves, row_tile
from metainfer.ops.base import Target
from metainfer.ops.rope import LayerNormRotateCase, NormRotateCase, RotateCase


@triton.jit(do_not_specialize=["rows"])
def _norm_rotate(
    x_ptr,
    weight_ptr,
    bias_ptr,
    rotation_ptr,
    y_ptr,
    rows,
    x_stride,
    y_stride,
    eps,
    HEADS: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """WIDTH channels of each head, HEAD_STRIDE numbers apart."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    wide, head = token.to(tl.int64), (row % HEADS) * HEAD_STRIDE
    y = prepared(
        x_ptr + wide * x_stride + head, token, row < rows,
        weight_ptr, bias_ptr, rotation_ptr, eps,
        WIDTH, NORM, WIDTH, FIRST, ROPE, INTERLEAVED, INVERSE, ROWS, BLOCK,
    )  # fmt: skip
    channel = tl.arange(0, BLOCK)[None, :]
    ok = (row < rows)[:, None] & (channel < WIDTH)
    tl.store(y_ptr + (wide * y_stride + head)[:, None] + channel, y, ok)


def rotate(
    launch: Launcher, case: RotateCase, x_THD: torch.Tensor, rotation_TR2: torch.Tensor
) -> torch.Tensor:
    # The channels that stay are neither read nor written.
    first = 0 if case.leading else case.width - case.rope_width
    x_THR = x_THD[..., first : first + case.rope_width]
    _launch(launch, case, x_THR, rotation_TR2, x_THR, 0)
    return x_THD


def norm_rotate(
    launch: Launcher,
    case: NormRotateCase,
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    first = case.width - case.rope_width
    norm = (weight_D, None, case.eps)
    _launch(launch, case, x_THD, rotation_TR2, x_THD, first, "rms", norm)
    return x_THD


def layer_norm_rotate(
    launch: Launcher,
    case: LayerNormRotateCase,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    y_TD = x_TD.new_empty(x_TD.shape)
    first = 0 if case.leading else case.width - case.rope_width
    rows = (x_TD.unsqueeze(1), rotation_TR2, y_TD.unsqueeze(1))
    _launch(launch, case, *rows, first, "layer", (weight_D, bias_D, case.eps))
    return y_TD


def _launch(
    launch: Launcher,
    case: RotateCase | NormRotateCase | LayerNormRotateCase,
    x_THD: torch.Tensor,
    rotation_TR2: torch.Tensor,
    y_THD: torch.Tensor,
    first: int,
    norm: str = "",
    weights: tuple[torch.Tensor | None, torch.Tensor | None, float] = (None, None, 0.0),
) -> None:
    """Channels from `first` on are rotated. The last argument: weight, bias and eps of the norm."""
    tokens, heads, width = x_THD.shape
    weight_D, bias_D, eps = weights
    interleaved = getattr(case, "interleaved", True)
    tile = row_tile(launch, tokens * heads, width)
    launch(
        _norm_rotate,
        (tile.programs,),
        x_THD,
        weight_D,
        bias_D,
        angles(rotation_TR2, interleaved),
        y_THD,
        tokens * heads,
        x_THD.stride(0),
        y_THD.stride(0),
        eps,
        HEADS=heads,
        HEAD_STRIDE=x_THD.stride(1),
        WIDTH=width,
        FIRST=first,
        ROPE=case.rope_width,
        INTERLEAVED=interleaved,
        INVERSE=getattr(case, "inverse", False),
        NORM=norm,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
    )


def rotate_eligible(case: RotateCase, target: Target) -> Verdict:
    return _eligible(case, case.rope_width, target)


def layer_norm_rotate_eligible(case: LayerNormRotateCase, target: Target) -> Verdict:
    return _eligible(case, case.width, target)


def _eligible(case: RotateCase | LayerNormRotateCase, width: int, target: Target) -> Verdict:
    """For rows of `width` channels in registers."""
    reason = "" if case.interleaved else refused_halves(case.rope_width, width)
    return no(reason) if reason else on_gpu(case, target)


BACKENDS = (
    Declared("rope.rotate", rotate, rotate_eligible),
    Declared("rope.norm_rotate", norm_rotate),
    Declared("norm.layer_norm_rotate", layer_norm_rotate, layer_norm_rotate_eligible),
)
