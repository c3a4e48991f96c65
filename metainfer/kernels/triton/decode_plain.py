"""Sparse decode in plain Triton: any width up to 512, any dtype, the interpreter.

One program holds M heads of one row and a part of that row's keys.

Shape suffixes: M heads of a program; N keys of a tile; D value channels; X further channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.prefill_plain import attend_tile


@triton.jit(
    do_not_specialize=[
        "rows", "window_columns", "entry_columns", "splits", "window_list_stride",
        "entry_list_stride",
    ]
)  # fmt: skip
def decode_plain(
    q, ring, window_rows, sink, entries, entry_rows, out, lse,
    rows, heads, window_columns, entry_columns, splits,
    ring_stride, entry_stride, window_list_stride, entry_list_stride, scale,
    M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr,
    BD: tl.constexpr, BX: tl.constexpr,
    WINDOW: tl.constexpr, ENTRIES: tl.constexpr, SINK: tl.constexpr, LSE: tl.constexpr,
    W_CODED: tl.constexpr, W_CODE: tl.constexpr, W_BLOCK: tl.constexpr, W_SCALE: tl.constexpr,
    W_PLAIN_AT: tl.constexpr, W_SCALES_AT: tl.constexpr,
    E_CODED: tl.constexpr, E_CODE: tl.constexpr, E_BLOCK: tl.constexpr, E_SCALE: tl.constexpr,
    E_PLAIN_AT: tl.constexpr, E_SCALES_AT: tl.constexpr,
    FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (row and M heads, split). Pointers are to the op's arguments; `scale` includes
    log2(e).

    Args:
        out, lse: [splits, rows, heads, D] and [splits, rows, heads]: each split leaves its own
            result; the first one counts the sink.
        WINDOW, ENTRIES: whether there is such a list.
        D, EXTRA, BD, BX: a key has D + EXTRA channels, of which the first D are its value; BD and
            BX are powers of two that hold them.
        W_CODED .. W_SCALES_AT, E_CODED .. E_SCALES_AT: how rows of the ring and of the entries
            are bytes (`key_rows`); CODED 0: they are numbers.
    """
    blocks = (heads + M - 1) // M
    t = (tl.program_id(0) // blocks).to(tl.int64)
    h_M = (tl.program_id(0) % blocks) * M + tl.arange(0, M)
    split = tl.program_id(1)
    d_D = tl.arange(0, BD)[None, :]
    d_X = tl.arange(0, BX)[None, :]
    n_N = tl.arange(0, BN)
    is_head_M = h_M < heads
    q_M = q + (t * heads + h_M) * (D + EXTRA)
    q_MD = tl.load(q_M[:, None] + d_D, mask=is_head_M[:, None] & (d_D < D), other=0.0)
    q_MX = q_MD
    if EXTRA > 0:
        q_MX = tl.load(q_M[:, None] + D + d_X, mask=is_head_M[:, None] & (d_X < EXTRA), other=0.0)
    top_M = tl.full([M], float("-inf"), tl.float32)
    mass_M = tl.zeros([M], tl.float32)
    if SINK and split == 0:
        top_M = tl.load(sink + h_M, mask=is_head_M, other=0.0) * 1.4426950408889634
        mass_M += 1.0
    acc_MD = tl.zeros([M, BD], tl.float32)
    window_tiles = (window_columns + BN - 1) // BN
    tiles = window_tiles + (entry_columns + BN - 1) // BN
    first = split * tiles // splits
    stop = (split + 1) * tiles // splits
    if WINDOW:
        for tile in range(first, tl.minimum(stop, window_tiles)):
            place_N = tile * BN + n_N
            listed_N = window_rows + t * window_list_stride + place_N
            row_N = tl.load(listed_N, mask=place_N < window_columns, other=-1)
            top_M, mass_M, acc_MD = attend_tile(
                q_MD, q_MX, ring + row_N * ring_stride, row_N >= 0, d_D, d_X,
                top_M, mass_M, acc_MD, scale, D, EXTRA, W_CODED, W_CODE, W_BLOCK, W_SCALE,
                W_PLAIN_AT, W_SCALES_AT, FP8, UPCAST,
            )  # fmt: skip
    if ENTRIES:
        for tile in range(tl.maximum(first, window_tiles), stop):
            place_N = (tile - window_tiles) * BN + n_N
            listed_N = entry_rows + t * entry_list_stride + place_N
            row_N = tl.load(listed_N, mask=place_N < entry_columns, other=-1)
            top_M, mass_M, acc_MD = attend_tile(
                q_MD, q_MX, entries + row_N * entry_stride, row_N >= 0, d_D, d_X,
                top_M, mass_M, acc_MD, scale, D, EXTRA, E_CODED, E_CODE, E_BLOCK, E_SCALE,
                E_PLAIN_AT, E_SCALES_AT, FP8, UPCAST,
            )  # fmt: skip
    at_M = (split * rows + t) * heads + h_M
    # Where nothing is seen, top is -inf and acc 0.
    mass_M = tl.where(mass_M > 0, mass_M, 1.0)
    if LSE:
        lse_M = (top_M + tl.log2(mass_M)) * 0.6931471805599453
        tl.store(lse + at_M, lse_M, mask=is_head_M)
    tl.store(
        out + (at_M * D)[:, None] + d_D,
        (acc_MD / mass_M[:, None]).to(out.dtype.element_ty),
        mask=is_head_M[:, None] & (d_D < D),
    )
