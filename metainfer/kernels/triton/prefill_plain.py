"""Sparse prefill in plain Triton: any width up to 512, any dtype, the interpreter.

One program holds M rows of the pair (row, head) that share their keys: one row with its heads.

Shape suffixes: M heads of a program; N keys of a tile; D value channels; X further channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import on_gpu
from metainfer.kernels.triton.key_rows import key_rows
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Target

# Parameters for which there is one code, whatever their values.
NUMBERS = ("columns", "table_stride", "selected_stride")
LISTS = ("positions", "latent_rows", "sink", "table", "sequence", "selected", "lse")

_MOST_CHANNELS = 512
_NARROW = 256  # channels of a value: tiles of any dtype are small


def serves(case: AttentionCase, target: Target) -> Verdict:
    """Where tiles of `plain_tile` fit: some inputs of every case need the plain kernels."""
    if case.width > _MOST_CHANNELS:
        return no(f"holds values of {_MOST_CHANNELS} channels at most, not of {case.width}")
    return on_gpu(case, target)


def plain_tile(
    case: AttentionCase, most_heads: int, *caches: torch.Tensor | None
) -> tuple[int, int]:
    """(heads, keys) of a tile of the plain kernels, so that it fits 99 KB of shared memory.

    Keys that come as fp32, or as codes that become fp32, take twice the bytes of those in bf16;
    what the compiler takes then is in tests/compiled/test_plain.py.

    Args:
        caches: what keys are read from.
    """
    in_fp32 = case.dtype == "float32"
    wide = in_fp32 or any(keys is not None and keys.dtype != torch.bfloat16 for keys in caches)
    large = case.width > _NARROW
    heads = 16 if case.heads <= 16 or (large and wide) else most_heads
    return heads, 16 if in_fp32 or (large and (wide or case.rope_extra)) else 32


@triton.jit
def attend_tile(
    q_MD, q_MX, at_N, there_N, d_D, d_X, top_M, mass_M, acc_MD, scale,
    D: tl.constexpr, EXTRA: tl.constexpr, CODED: tl.constexpr, CODE: tl.constexpr,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, PLAIN_AT: tl.constexpr, SCALES_AT: tl.constexpr,
    FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(top, mass, acc) with one tile of keys more; they are bytes where CODED is not 0."""
    if CODED > 0:
        k_ND = key_rows(at_N, there_N, D, CODED, CODE, BLOCK, SCALE, PLAIN_AT, SCALES_AT, FP8)
        extra_at_N1 = (at_N[:, None] + PLAIN_AT).to(tl.pointer_type(tl.bfloat16))
    else:
        k_ND = tl.load(at_N[:, None] + d_D, mask=there_N[:, None] & (d_D < D), other=0.0)
        extra_at_N1 = at_N[:, None] + D
    k_ND = k_ND.to(q_MD.dtype)
    wide_MD, wide_ND = q_MD, k_ND
    if UPCAST:
        wide_MD, wide_ND = q_MD.to(tl.float32), k_ND.to(tl.float32)
    score_MN = tl.dot(wide_MD, tl.trans(wide_ND), input_precision="ieee")
    if EXTRA > 0:
        k_NX = tl.load(extra_at_N1 + d_X, mask=there_N[:, None] & (d_X < EXTRA), other=0.0)
        k_NX = k_NX.to(q_MD.dtype)
        wide_MX, wide_NX = q_MX, k_NX
        if UPCAST:
            wide_MX, wide_NX = q_MX.to(tl.float32), k_NX.to(tl.float32)
        score_MN = tl.dot(wide_MX, tl.trans(wide_NX), score_MN, input_precision="ieee")
    score_MN = tl.where(there_N[None, :], score_MN * scale, float("-inf"))
    new_M = tl.maximum(top_M, tl.max(score_MN, 1))
    safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = tl.exp2(score_MN - safe_M[:, None])
    old_M = tl.exp2(top_M - safe_M)
    mass_M = mass_M * old_M + tl.sum(p_MN, 1)
    p_MN = p_MN.to(q_MD.dtype)
    if UPCAST:
        p_MN = p_MN.to(tl.float32)
    acc_MD = tl.dot(p_MN, wide_ND, acc_MD * old_M[:, None], input_precision="ieee")
    return new_M, mass_M, acc_MD


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=LISTS)
def prefill_plain(
    q, positions, latents, latent_rows, sink, entries, table, sequence, selected, out, lse,
    heads, columns, latent_stride, entry_stride, table_stride, selected_stride, scale,
    M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr,
    BD: tl.constexpr, BX: tl.constexpr,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, LSE: tl.constexpr, SEQUENCES: tl.constexpr, TABLE: tl.constexpr,
    CODED: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
    PLAIN_AT: tl.constexpr, SCALES_AT: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (row, M heads). Pointers are to the op's arguments; `scale` includes log2(e).

    Args:
        columns: of `selected`; where rows see all entries, as many as the table has.
        table, TABLE: rows of entries; without a table each sequence's lie in order, every
            table_stride rows.
        D, EXTRA, BD, BX: a key has D + EXTRA channels, of which the first D are its value; BD and
            BX are powers of two that hold them.
        CODED .. FP8: how rows of `entries` are bytes (`key_rows`); CODED 0: they are numbers.
    """
    blocks = (heads + M - 1) // M
    t = (tl.program_id(0) // blocks).to(tl.int64)
    h_M = (tl.program_id(0) % blocks) * M + tl.arange(0, M)
    p = tl.load(positions + t)
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
    if SINK:
        top_M = tl.load(sink + h_M, mask=is_head_M, other=0.0) * 1.4426950408889634
        mass_M += 1.0
    acc_MD = tl.zeros([M, BD], tl.float32)
    if WINDOW > 0:
        last = tl.load(latent_rows + t)
        low = last - tl.minimum(p, WINDOW - 1)
        window_tiles = (last - low + BN).to(tl.int32) // BN
        for tile in range(window_tiles):
            row_N = low + tile * BN + n_N
            top_M, mass_M, acc_MD = attend_tile(
                q_MD, q_MX, latents + row_N * latent_stride, row_N <= last, d_D, d_X,
                top_M, mass_M, acc_MD, scale, D, EXTRA, 0, "", 1, "", 0, 0, False, UPCAST,
            )  # fmt: skip
    if RATIO > 0:
        seen = (p + 1) // RATIO
        first = p * 0
        if SEQUENCES:
            first = tl.load(sequence + t) * table_stride
        tiles = (columns + BN - 1) // BN
        if not SELECTED:
            seen = tl.minimum(seen, columns)
            tiles = (seen.to(tl.int32) + BN - 1) // BN
        for tile in range(tiles):
            name_N = (tile * BN + n_N).to(tl.int64)
            if SELECTED:
                at_N = selected + t * selected_stride + name_N
                name_N = tl.load(at_N, mask=name_N < columns, other=-1)
            there_N = (name_N >= 0) & (name_N < seen)
            row_N = first + name_N
            if TABLE:
                row_N = tl.load(table + row_N, mask=there_N, other=0)
            top_M, mass_M, acc_MD = attend_tile(
                q_MD, q_MX, entries + row_N * entry_stride, there_N, d_D, d_X,
                top_M, mass_M, acc_MD, scale, D, EXTRA, CODED, CODE, BLOCK, SCALE, PLAIN_AT,
                SCALES_AT, FP8, UPCAST,
            )  # fmt: skip
    if LSE:
        lse_M = (top_M + tl.log2(mass_M)) * 0.6931471805599453
        tl.store(lse + t * heads + h_M, lse_M, mask=is_head_M)
    share_M = tl.where(mass_M > 0, 1 / mass_M, 0.0)
    to_MD = out + ((t * heads + h_M) * D)[:, None] + d_D
    tl.store(
        to_MD,
        (acc_MD * share_M[:, None]).to(out.dtype.element_ty),
        mask=is_head_M[:, None] & (d_D < D),
    )
