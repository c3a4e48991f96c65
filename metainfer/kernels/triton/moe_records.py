"""Rows of tiles as grouped_fp4.cu copies them: records, one for a tile and 128 columns.

A record has the codes of BM slots, 128 bytes each, then their scales in fp32. Of a slot's 32 words
(four codes each), word 8 c + p is word c of the piece p of 16 bytes; pieces are swizzled by 128
bytes as matrix instructions want them. Scales are in the order in which one thread wants them (see
scale_place in grouped_fp4.cuh). What is behind the last slot of a tile is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e8m0_to_float
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.moe_order import Order

_STEP = 128  # columns of a record


@triton.jit(do_not_specialize=["stride"])
def gather_records(
    words_ptr,
    scales_ptr,
    slots_ptr,
    experts_ptr,
    out_ptr,
    stride,
    STEPS: tl.constexpr,
    PER: tl.constexpr,
    BM: tl.constexpr,
):
    """Codes of rows as words int32 [rows, stride] and e8m0 [rows, STEPS] -> one record."""
    tile, step = tl.program_id(0), tl.program_id(1)
    if tl.load(experts_ptr + tile) >= 0:
        n_M, w_W = tl.arange(0, BM), tl.arange(0, 32)
        slot_M = tl.load(slots_ptr + tile * BM + n_M)
        ok_M = slot_M >= 0
        row_M = (tl.where(ok_M, slot_M, 0) // PER).to(tl.int64)
        from_MW = 8 * (w_W % 4)[None, :] + ((w_W // 4)[None, :] ^ (n_M % 8)[:, None])
        at_MW = words_ptr + row_M[:, None] * stride + step * 32 + from_MW
        word_MW = tl.load(at_MW, ok_M[:, None], 0)
        scale_M = e8m0_to_float(tl.load(scales_ptr + row_M * STEPS + step, ok_M, 0))
        place_M = n_M // 16 * 16 + n_M // 2 % 4 * 4 + n_M // 8 % 2 * 2 + n_M % 2
        record_ptr = out_ptr + (tile.to(tl.int64) * STEPS + step) * (33 * BM)
        tl.store(record_ptr + n_M[:, None] * 32 + w_W[None, :], word_MW, ok_M[:, None])
        tl.store(record_ptr + 32 * BM + place_M, scale_M.to(tl.int32, bitcast=True), ok_M)


def record_words(height: int) -> int:
    """int32 of a record."""
    return 33 * height


def records(
    launch: Launcher,
    codes_TD: torch.Tensor,
    scales_TG: torch.Tensor,
    placed: Order,
    selected: int,
    height: int,
) -> torch.Tensor:
    """int32 [tiles, D / 128, record_words].

    Args:
        codes_TD: e4m3, rows whole words apart.
        scales_TG: e8m0, contiguous.
    """
    words = codes_TD.view(torch.int32)
    steps = codes_TD.shape[1] // _STEP
    out = words.new_empty(placed.tiles, steps, record_words(height))
    launch(
        gather_records,
        (placed.tiles, steps),
        words,
        scales_TG,
        placed.slots,
        placed.experts,
        out,
        words.stride(0),
        num_warps=4,
        STEPS=steps,
        PER=selected,
        BM=height,
    )
    return out
