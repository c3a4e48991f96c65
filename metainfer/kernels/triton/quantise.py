"""Rows to fp8 groups, after the rotation of heads back where the case asks, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.codes import e4m3_groups, e8m0_to_float
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.rows import prepared, row_tile
from metainfer.ops.base import Target
from metainfer.ops.norm import RmsNormFp8Case
from metainfer.ops.quantise import QuantiseFp8Case

_LONGEST_PIECE = 1024


@triton.jit(do_not_specialize=["rows"])
def _quantise_fp8(
    x_ptr,
    rotation_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    x_stride,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is one of the PIECES of a token, heads or parts of a long row, of WIDTH channels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, piece = row // PIECES, row % PIECES
    x = prepared(
        x_ptr + token.to(tl.int64) * x_stride + piece * WIDTH, token, row < rows,
        None, None, rotation_ptr, 0.0,
        WIDTH, "", 0, WIDTH - ROPE, ROPE, True, True, ROWS, BLOCK,
    )  # fmt: skip
    codes, scale = e4m3_groups(x, ROWS, BLOCK, GROUP)
    channel = tl.arange(0, BLOCK)[None, :]
    ok = (row < rows)[:, None] & (channel < WIDTH)
    wide = row.to(tl.int64)[:, None]
    tl.store(codes_ptr + wide * WIDTH + channel, tl.reshape(codes, (ROWS, BLOCK)), ok)
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    kept = scale.to(tl.uint8) if E8M0 else e8m0_to_float(scale)
    listed = (row < rows)[:, None] & (group < WIDTH // GROUP)
    tl.store(scales_ptr + wide * (WIDTH // GROUP) + group, kept, listed)


def fp8(
    launch: Launcher,
    case: QuantiseFp8Case,
    x_THD: torch.Tensor,
    rotation_TR2: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = len(x_THD), case.heads * case.width
    codes_TI = x_THD.new_empty((tokens, width), dtype=torch.uint8)
    kept = torch.uint8 if case.scale == "e8m0" else torch.float32
    scales_TG = x_THD.new_empty((tokens, width // case.group), dtype=kept)
    pieces, piece = (case.heads, case.width) if case.rope_width else _pieces(width, case.group)
    tile = row_tile(launch, tokens * pieces, piece)
    launch(
        _quantise_fp8,
        (tile.programs,),
        x_THD,
        rotation_TR2,
        codes_TI,
        scales_TG,
        tokens * pieces,
        x_THD.stride(0),
        PIECES=pieces,
        WIDTH=piece,
        ROPE=case.rope_width,
        GROUP=case.group,
        E8M0=case.scale == "e8m0",
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
    )
    return codes_TI, scales_TG


def _pieces(width: int, group: int) -> tuple[int, int]:
    """(how many, width) of the pieces of a row: the longest power of two of channels that fills
    it, and whole groups."""
    piece = group
    while piece < _LONGEST_PIECE and width % (2 * piece) == 0:
        piece *= 2
    return width // piece, piece


def in_groups(case: QuantiseFp8Case | RmsNormFp8Case, target: Target) -> Verdict:
    """Serves groups that lie within a row, or a head."""
    if case.group & (case.group - 1) or case.width % case.group:
        return no(f"wants groups that are a power of two and fill {case.width} channels")
    return on_gpu(case, target)


BACKENDS = (Declared("quantise.fp8", fp8, in_groups),)
