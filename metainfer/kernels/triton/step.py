"""The index of a decode step in Triton: one launch in place of some fifty small operations.

Program (row, piece): piece 0 makes all that is short, each other one a piece of a list of entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.ops.base import Target
from metainfer.ops.step import StepIndexCase, Windows

_PIECE = 1024  # entries of a program
_RATIOS = 2
_NONE = Windows(0, 0)

Angles = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def turn(position, table, frequency, to, R: tl.constexpr, BR: tl.constexpr,
         TABLE: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Cosine and sine of R / 2 angles of one position, in turns."""
    r_R = tl.arange(0, BR)
    if TABLE:
        both_R = tl.load(table + position * R + r_R, r_R < R, 0.0)
    else:
        angle_R = position.to(tl.float32) * tl.load(frequency + r_R // 2, r_R < R, 0.0)
        # Angles are up to a million: the instructions for sine and cosine are for small ones.
        if INTERPRETED:
            both_R = tl.where(r_R % 2 == 0, tl.cos(angle_R), tl.sin(angle_R))
        else:
            both_R = tl.where(r_R % 2 == 0, libdevice.cos(angle_R), libdevice.sin(angle_R))
    tl.store(to + r_R, both_R, r_R < R)


@triton.jit
def ring_rows(slot, position, back: tl.constexpr, N: tl.constexpr, ring):
    """int64 [N], ring rows of `back` positions up to `position`; -1 for negative ones."""
    at_N = position + 1 - back + tl.arange(0, N)
    return tl.where(at_N < 0, -1, slot * ring + tl.maximum(at_N, 0) % ring)


@triton.jit
def window_numbers(
    t, position, slot, tables, table_stride, numbers, rotation, table, frequency, ring, shard,
    SHARDS: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr, BS: tl.constexpr, T,
    BLOCK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, TABLE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Of a ratio: phase, ring row and target of row t, each T numbers, then T lists of the window;
    and its angles."""
    some = tl.maximum(position, 0)
    window = some // RATIO
    per_block: tl.constexpr = BLOCK // RATIO
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    closes &= window // per_block % SHARDS == shard
    # The remainder of a negative number has the sign of the divisor.
    phase = tl.where(position < 0, (position % RATIO + RATIO) % RATIO, position % RATIO)
    place = tl.where(position < 0, (position % ring + ring) % ring, position % ring)
    block = tl.load(tables + slot * table_stride + window // (per_block * SHARDS))
    target = tl.where(closes, block * per_block + window % per_block, -1)
    tl.store(numbers + t, phase)
    tl.store(numbers + T + t, slot * ring + place)
    tl.store(numbers + 2 * T + t, target)
    s_S = tl.arange(0, BS)
    list_S = tl.where(closes, ring_rows(slot, position, SPAN, BS, ring), -1)
    tl.store(numbers + 3 * T + t * SPAN + s_S, list_S, s_S < SPAN)
    turn(window * RATIO, table, frequency, rotation + t * R, R, BR, TABLE, INTERPRETED)


@triton.jit
def entry_piece(
    piece, t, position, slot, tables, table_stride, entries, rows, shard,
    SHARDS: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A piece of the list of entries of row t; `rows` [T, entries + 1]."""
    per_block: tl.constexpr = BLOCK // RATIO
    e_E = piece * PIECE + tl.arange(0, PIECE)
    seen = (position + 1) // RATIO
    per_round: tl.constexpr = per_block * SHARDS
    own = tl.minimum(tl.maximum(seen % per_round - shard * per_block, 0), per_block)
    seen_E = (e_E < entries) & (e_E < seen // per_round * per_block + own)
    block_E = tl.load(tables + slot * table_stride + e_E // per_block, seen_E, 0)
    row_E = tl.where(seen_E, block_E * per_block + e_E % per_block, -1)
    tl.store(rows + t * (entries + 1) + e_E, row_E, e_E <= entries)


@triton.jit(do_not_specialize=["T", "entries0", "entries1", "pieces0", "shard"],
            do_not_specialize_on_alignment=["tables"])  # fmt: skip
def index_step(
    positions, slots, tables, table_stride,
    sliding, sliding_frequency, compressing, compressing_frequency,
    angles, latents, numbers0, numbers1, entry_rows0, entry_rows1,
    T, window_ring, ring0, ring1, entries0, entries1, pieces0, shard, SHARDS: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, RATIO0: tl.constexpr, SPAN0: tl.constexpr,
    BS0: tl.constexpr, RATIO1: tl.constexpr, SPAN1: tl.constexpr, BS1: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, PIECE: tl.constexpr,
    SLIDING_TABLE: tl.constexpr, TABLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """
    Args:
        angles: [2 + ratios, T, R], of sliding and of compressing rows, then of entries.
        latents: T ring rows, then T lists of the window.
        numbers0, numbers1: of each ratio, as `window_numbers` has them.
        entry_rows0, entry_rows1: of each ratio, [T, entries + 1].
        pieces0: of the first ratio's list.
    """
    t, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions + t), tl.load(slots + t)
    if piece == 0:
        some = tl.maximum(position, 0)
        turn(some, sliding, sliding_frequency, angles + t * R, R, BR, SLIDING_TABLE, INTERPRETED)
        to = angles + (T + t) * R
        turn(some, compressing, compressing_frequency, to, R, BR, TABLE, INTERPRETED)
        place = (position % window_ring + window_ring) % window_ring
        tl.store(latents + t, slot * window_ring + place)
        w_W = tl.arange(0, BW)
        list_W = ring_rows(slot, position, W, BW, window_ring)
        tl.store(latents + T + t * W + w_W, list_W, w_W < W)
        if RATIO0:
            window_numbers(
                t, position, slot, tables, table_stride, numbers0,
                angles + 2 * T * R, compressing, compressing_frequency, ring0,
                shard, SHARDS, RATIO0, SPAN0, BS0, T, BLOCK, R, BR, TABLE, INTERPRETED,
            )  # fmt: skip
        if RATIO1:
            window_numbers(
                t, position, slot, tables, table_stride, numbers1,
                angles + 3 * T * R, compressing, compressing_frequency, ring1,
                shard, SHARDS, RATIO1, SPAN1, BS1, T, BLOCK, R, BR, TABLE, INTERPRETED,
            )  # fmt: skip
    elif piece <= pieces0:
        if RATIO0:
            entry_piece(
                piece - 1, t, position, slot, tables, table_stride, entries0, entry_rows0,
                shard, SHARDS, RATIO0, BLOCK, PIECE,
            )  # fmt: skip
    elif RATIO1:
        entry_piece(
            piece - 1 - pieces0, t, position, slot, tables, table_stride, entries1,
            entry_rows1, shard, SHARDS, RATIO1, BLOCK, PIECE,
        )  # fmt: skip


def index_decode(
    launch: Launcher,
    case: StepIndexCase,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    tables_NM: torch.Tensor,
    draft_rows: int,
    sliding: Angles,
    compressing: Angles,
) -> tuple[torch.Tensor, ...]:
    rows, blocks, channels = len(positions_T), tables_NM.shape[1], case.rope_width
    end = blocks * case.block_tokens * case.shards
    first, second = (*case.windows, *[_NONE] * _RATIOS)[:_RATIOS]
    counts = [blocks * (case.block_tokens // of.ratio) for of in case.windows]
    pieces = [cdiv(count + 1, _PIECE) for count in counts]
    angles_NTR2 = sliding[0].new_empty(2 + len(counts), rows, channels // 2, 2)
    latents = positions_T.new_empty(rows * (1 + case.window))
    numbers = [positions_T.new_empty(rows * (3 + of.span)) for of in case.windows]
    entries = [positions_T.new_empty(rows, count + 1) for count in counts]
    missing = _RATIOS - len(counts)
    launch(
        index_step,
        (rows, 1 + sum(pieces)),
        positions_T,
        slots_T,
        tables_NM,
        tables_NM.stride(0),
        *sliding,
        *compressing,
        angles_NTR2,
        latents,
        *numbers,
        *[None] * missing,
        *entries,
        *[None] * missing,
        rows,
        case.window + draft_rows,
        first.span + draft_rows,
        second.span + draft_rows,
        *counts,
        *[0] * missing,
        pieces[0] if pieces else 0,
        case.shard,
        SHARDS=case.shards,
        W=case.window,
        BW=next_power_of_2(case.window),
        RATIO0=first.ratio,
        SPAN0=first.span,
        BS0=next_power_of_2(max(1, first.span)),
        RATIO1=second.ratio,
        SPAN1=second.span,
        BS1=next_power_of_2(max(1, second.span)),
        BLOCK=case.block_tokens,
        R=channels,
        BR=next_power_of_2(channels),
        PIECE=_PIECE,
        SLIDING_TABLE=end <= len(sliding[0]),
        TABLE=end <= len(compressing[0]),
        INTERPRETED=launch.interpreted,
    )
    sliding_TR2, compressing_TR2, *rotations = angles_NTR2.unbind(0)
    found = [sliding_TR2, compressing_TR2, latents[:rows], latents[rows:].view(rows, case.window)]
    for windows, own, rotation_TR2, entry_rows_TE in zip(
        case.windows, numbers, rotations, entries, strict=True
    ):
        phase_T, ring_rows_T, target_T = own[: 3 * rows].view(3, rows).unbind(0)
        closing_TS = own[3 * rows :].view(rows, windows.span)
        found += [phase_T, ring_rows_T, closing_TS, target_T, rotation_TR2, entry_rows_TE]
    return tuple(found)


def eligible(case: StepIndexCase, target: Target) -> Verdict:
    if len(case.windows) > _RATIOS:
        return no(f"has room for {_RATIOS} ratios, not {len(case.windows)}")
    return on_gpu(case, target)


BACKENDS = (Declared("step.index_decode", index_decode, eligible),)
