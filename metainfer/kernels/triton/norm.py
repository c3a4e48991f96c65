"""The RMS norm, after an addition and into fp8 groups where the case asks, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.codes import e4m3_groups, e8m0_to_float
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.quantise import in_groups
from metainfer.kernels.triton.rows import rms_normed, rounded, row_tile
from metainfer.ops.norm import AddRmsNormCase, RmsNormCase, RmsNormFp8Case


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
):
    """residual_ptr, sum_ptr, y_ptr and codes_ptr with scales_ptr are None where nobody asks."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    ok = (row < rows) & (channel < WIDTH)
    x = tl.load(x_ptr + row * x_stride + channel, ok, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + channel, ok, other=0.0)
        x = rounded(x + residual.to(tl.float32), sum_ptr)
        tl.store(sum_ptr + row * WIDTH + channel, x, ok)
    y = rms_normed(x, weight_ptr, eps, channel, WIDTH)
    if y_ptr is not None:
        tl.store(y_ptr + row * WIDTH + channel, rounded(y, y_ptr), ok)
    if codes_ptr is not None:
        codes, scale = e4m3_groups(rounded(y, x_ptr), ROWS, BLOCK, GROUP)
        tl.store(codes_ptr + row * WIDTH + channel, tl.reshape(codes, (ROWS, BLOCK)), ok)
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        kept = scale.to(tl.uint8) if E8M0 else e8m0_to_float(scale)
        places = scales_ptr + row * (WIDTH // GROUP) + group
        tl.store(places, kept, (row < rows) & (group < WIDTH // GROUP))


def rms_norm(
    launch: Launcher, case: RmsNormCase, x_TD: torch.Tensor, weight_D: torch.Tensor
) -> torch.Tensor:
    y_TD = x_TD.new_empty(x_TD.shape, dtype=TORCH_DTYPES[case.dtype])
    _launch(launch, case, x_TD, None, weight_D, None, y_TD)
    return y_TD


def add_rms_norm(
    launch: Launcher,
    case: AddRmsNormCase,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    sum_TD, y_TD = (x_TD.new_empty(x_TD.shape) for _ in range(2))
    _launch(launch, case, x_TD, residual_TD, weight_D, sum_TD, y_TD)
    return sum_TD, y_TD


def rms_norm_fp8(
    launch: Launcher,
    case: RmsNormFp8Case,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    codes_TD = x_TD.new_empty(x_TD.shape, dtype=torch.uint8)
    kept = torch.uint8 if case.scale == "e8m0" else torch.float32
    scales_TG = x_TD.new_empty((len(x_TD), case.width // case.group), dtype=kept)
    sum_TD = x_TD.new_empty(x_TD.shape) if case.adds else None
    y_TD = x_TD.new_empty(x_TD.shape) if case.normed else None
    codes = (codes_TD, scales_TG)
    _launch(launch, case, x_TD, residual_TD, weight_D, sum_TD, y_TD, codes, case.group)
    return tuple(made for made in (*codes, y_TD, sum_TD) if made is not None)


def _launch(
    launch: Launcher,
    case: Any,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    sum_TD: torch.Tensor | None,
    y_TD: torch.Tensor | None,
    codes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    group: int = 0,
) -> None:
    tile = row_tile(launch, len(x_TD), case.width)
    launch(
        _rms_norm,
        (tile.programs,),
        x_TD,
        residual_TD,
        weight_D,
        sum_TD,
        y_TD,
        *codes,
        len(x_TD),
        x_TD.stride(0),
        x_TD.stride(0) if residual_TD is None else residual_TD.stride(0),
        case.eps,
        WIDTH=case.width,
        ROWS=tile.rows,
        BLOCK=tile.block,
        GROUP=group,
        E8M0=getattr(case, "scale", "") == "e8m0",
        num_warps=tile.num_warps,
    )


BACKENDS = (
    Declared("norm.rms_norm", rms_norm),
    Declared("norm.add_rms_norm", add_rms_norm),
    Declared("norm.rms_norm_fp8", rms_norm_fp8, in_groups),
)
