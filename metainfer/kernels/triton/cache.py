"""Latents into caches: norm, rotation, encoding and write, and the row as the cache keeps it; and
rows of caches as numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.codes import (
    e2m1_groups_by_e4m3,
    e2m1_to_float,
    e4m3_groups,
    e4m3_to_float,
    e8m0_to_float,
    packed_pairs,
)
from metainfer.kernels.triton.key_rows import decoded
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.rows import RowTile, prepared, rounded, row_tile
from metainfer.ops.cache import DENSE, CacheReadCase, CacheWriteCase
from metainfer.ops.formats import FORMATS


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _write_dense(
    x_ptr,
    weight_ptr,
    rotation_ptr,
    cache_ptr,
    rows_ptr,
    y_ptr,
    rows,
    x_stride,
    cache_stride,
    eps,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = prepared(
        x_ptr + row.to(tl.int64) * x_stride, row, row < rows,
        weight_ptr, None, rotation_ptr, eps,
        WIDTH, "rms" if NORMED else "", NORMED, WIDTH - ROPE, ROPE, True, False, ROWS, BLOCK,
    )  # fmt: skip
    x = rounded(x, cache_ptr)
    channel = tl.arange(0, BLOCK)[None, :]
    wide = row.to(tl.int64)[:, None]
    tl.store(y_ptr + wide * WIDTH + channel, rounded(x, y_ptr), (wide < rows) & (channel < WIDTH))
    place = tl.load(rows_ptr + row, row < rows, other=-1)[:, None]
    tl.store(cache_ptr + place * cache_stride + channel, x, (place >= 0) & (channel < WIDTH))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _write_codes(
    x_ptr,
    weight_ptr,
    rotation_ptr,
    codes_ptr,
    scales_ptr,
    plain_ptr,
    rows_ptr,
    y_ptr,
    rows,
    x_stride,
    pieces,
    eps,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    ROPE: tl.constexpr,
    CODE: tl.constexpr,
    CODED: tl.constexpr,
    GROUP: tl.constexpr,
    FP32_SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """codes_ptr, scales_ptr and plain_ptr are the first row's codes, scales and bf16 channels, each
    in a type of its own; rows are `pieces` times 16 bytes apart; ZEROS bytes follow the scales."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = prepared(
        x_ptr + row.to(tl.int64) * x_stride, row, row < rows,
        weight_ptr, None, rotation_ptr, eps,
        WIDTH, "rms" if NORMED else "", NORMED, WIDTH - ROPE, ROPE, True, False, ROWS, BLOCK,
    )  # fmt: skip
    place = tl.load(rows_ptr + row, row < rows, other=-1)[:, None]
    listed = place >= 0
    place *= pieces
    scale_row = scales_ptr + place * (4 if FP32_SCALES else 16)
    channel = tl.arange(0, BLOCK)[None, :]
    coded = channel < CODED
    if CODE == "e4m3":
        codes, scale = e4m3_groups(x, ROWS, BLOCK, GROUP)
        value = e8m0_to_float(scale)
        numbers = e4m3_to_float(codes, False) * value[:, :, None]
        kept = tl.reshape(codes, (ROWS, BLOCK))
        tl.store(codes_ptr + place * 16 + channel, kept, listed & coded)
    else:
        codes, scale, value = e2m1_groups_by_e4m3(x, ROWS, BLOCK, GROUP)
        numbers = e2m1_to_float(codes) * value[:, :, None]
        pair = tl.arange(0, BLOCK // 2)[None, :]
        kept = packed_pairs(codes, ROWS, BLOCK)
        tl.store(codes_ptr + place * 16 + pair, kept, listed & (pair < CODED // 2))
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    scales = value if FP32_SCALES else scale.to(tl.uint8)
    listed_groups = listed & (group < CODED // GROUP)
    tl.store(scale_row + group, scales, listed_groups)
    if ZEROS:
        zero = tl.arange(0, 16)[None, :]
        padding = scale_row + CODED // GROUP + zero
        tl.store(padding, tl.zeros([ROWS, 16], tl.uint8), listed & (zero < ZEROS))
    y = tl.reshape(numbers, (ROWS, BLOCK))
    if CODED < WIDTH:
        plain = rounded(x, plain_ptr)
        places = plain_ptr + place * 8 + (channel - CODED)
        tl.store(places, plain, listed & (channel >= CODED) & (channel < WIDTH))
        y = tl.where(coded, y, plain)
    wide = row.to(tl.int64)[:, None]
    tl.store(y_ptr + wide * WIDTH + channel, rounded(y, y_ptr), (wide < rows) & (channel < WIDTH))


def write(
    launch: Launcher,
    case: CacheWriteCase,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor | None,
    cache: torch.Tensor,
    rows_T: torch.Tensor,
) -> torch.Tensor:
    y_TD = x_TD.new_empty(x_TD.shape)
    tile = row_tile(launch, len(x_TD), case.width)
    latents = (x_TD, weight_D, rotation_TR2)
    if case.format == DENSE:
        launch(
            _write_dense,
            (tile.programs,),
            *latents,
            cache,
            rows_T,
            y_TD,
            len(x_TD),
            x_TD.stride(0),
            cache.stride(0),
            case.eps,
            **_constants(case, tile),
        )
        return y_TD
    form = FORMATS[case.format]
    # The same rows as codes, as scales and as the bf16 channels.
    fp32_scales = form.scale == "fp32"
    scales = cache[:, form.scales_at :]
    if fp32_scales:
        scales = cache.view(torch.float32)[:, form.scales_at // 4 :]
    plain = cache.view(torch.bfloat16)[:, form.plain_at // 2 :] if form.plain else None
    launch(
        _write_codes,
        (tile.programs,),
        *latents,
        cache,
        scales,
        plain,
        rows_T,
        y_TD,
        len(x_TD),
        x_TD.stride(0),
        cache.stride(0) // 16,
        case.eps,
        CODE=form.code,
        CODED=form.coded,
        GROUP=form.block,
        FP32_SCALES=fp32_scales,
        ZEROS=form.zeros,
        **_constants(case, tile),
    )
    return y_TD


def read(
    launch: Launcher, case: CacheReadCase, cache: torch.Tensor, rows_T: torch.Tensor
) -> torch.Tensor:
    width = FORMATS[case.format].width
    extra = width - 2 ** (width.bit_length() - 1)
    # Of one sequence all rows are seen.
    seen_1 = rows_T.new_full((1,), len(rows_T))
    return decoded(
        launch,
        case.format,
        cache,
        rows_T.unsqueeze(0),
        seen_1,
        width - extra,
        extra,
        TORCH_DTYPES[case.dtype],
    )


def _constants(case: CacheWriteCase, tile: RowTile) -> dict[str, int]:
    return {
        "WIDTH": case.width,
        "NORMED": case.normed,
        "ROPE": case.rope_width,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "num_warps": tile.num_warps,
    }


BACKENDS = (Declared("cache.write", write), Declared("cache.read", read))
