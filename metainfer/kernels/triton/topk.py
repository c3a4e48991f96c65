"""The K best of each row of scores, exactly: in ascending order of place, lower places first among
equals.

One program takes one row, or a part of one, and reads its scores twice (the second time from the
L2 cache). First it keeps the largest of each of G interleaved groups: the K-th largest of those is
a bound that K scores reach. Then it gathers the places that reach it, few more than K unless the
scores are odd, and cuts them down to K. Rows of odd scores, such as many equals, where more are
gathered than the buffer holds, are left to a second kernel, which cuts the buffer down whenever it
is full, and from then on lets only better scores in.

Rows that are split give the K best of each part with their scores, which are reduced again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.launch import Launcher, next_power_of_2
from metainfer.kernels.triton.topk_cut import (
    LEAST,
    NOTHING,
    SIZES,
    best_of_odd_row,
    cut,
    number_of,
    ordered_bits,
    part_of_row,
    reached_by,
    write_best,
    write_rest,
)

# Rounds of the search for the bound: it is right to 2^-12 of the range of the groups' largest.
_ROUNDS = tl.constexpr(12)


@triton.jit
def _lower_bound(scores, stop, K: tl.constexpr, GROUPS: tl.constexpr):
    """fp32, what at least K of the first `stop` scores reach, and not many more; the least number
    where that many are not to be found. Four times GROUPS scores are read at a time."""
    lane = tl.arange(0, GROUPS)[None, :]
    place = tl.arange(0, 4)[:, None] * GROUPS + lane
    largest = tl.full([GROUPS], NOTHING, tl.float32)
    for first in range(0, stop, 4 * GROUPS):
        x = tl.load(scores + first + place)
        x = tl.where(first + place < stop, x, NOTHING)
        largest = tl.maximum(largest, tl.max(x, 0))
    bound, _ = reached_by(ordered_bits(largest), largest >= NOTHING, GROUPS, K, _ROUNDS)
    return number_of(tl.maximum(bound, ordered_bits(tl.full([], LEAST, tl.float32))))


@triton.jit
def _mark(scores, start, stop, least, marks, TILE: tl.constexpr):
    """Writes a bit for each of the scores from `start` on, in whole tiles: whether it reaches the
    bound, or is NaN."""
    lane = tl.arange(0, TILE)
    byte = tl.arange(0, TILE // 8)
    for at in range(start, stop, TILE):
        x = tl.load(scores + at + lane)
        bits = tl.where(x < least, 0, 1 << (lane % 8))
        bits = tl.sum(tl.reshape(bits, [TILE // 8, 8]), 1)
        tl.store(marks + (at - start) // 8 + byte, bits.to(tl.uint8))


@triton.jit
def _gather(marks, start, stop, unit, places, held, WORDS: tl.constexpr, CAPACITY: tl.constexpr):
    """Writes the places of marks behind those that are held, as long as they fit in; returns how
    many there are.

    Args:
        unit: 1, which the compiler does not know: so threads take words one by one, as they write
            places, and nothing has to change threads.
    """
    word = tl.arange(0, WORDS)
    left = stop - start - word * 32
    marked = tl.load(marks.to(tl.pointer_type(tl.uint32)) + word * unit, mask=left > 0, other=0)
    marked &= tl.where(left < 32, (1 << tl.maximum(left, 0)) - 1, -1).to(tl.uint32, bitcast=True)
    count = marked - ((marked >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (((count + (count >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)
    to = held + tl.cumsum(count, 0) - count
    for _ in range(0, tl.max(count, 0)):
        rest = marked & (marked - 1)
        bit = ((marked ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(places + to, start + word * 32 + bit, mask=(marked != 0) & (to < CAPACITY))
        marked = rest
        to += 1
    return held + tl.sum(count, 0)


@triton.jit
def _finish(
    scores, places, unit, held, out_ids, out_scores, row, part, first,
    names, candidates, width, out_width, candidates_width,
    CAPACITY: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cuts the places that are held down to the K best and writes them."""
    slot = tl.arange(0, CAPACITY)
    is_there = slot < held
    place = tl.load(places + slot * unit, mask=is_there, other=0)
    x = tl.load(scores + place, mask=is_there, other=0.0)
    ordered = tl.where(is_there, ordered_bits(tl.where(x >= NOTHING, x, LEAST)), 0)
    flags, _ = cut(ordered, is_there, held, tl.minimum(held, K))
    write_best(
        out_ids, out_scores, row, part, number_of(ordered), first + place, flags,
        names, candidates, width, out_width, candidates_width, K, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*SIZES, "unit"], do_not_specialize_on_alignment=["candidates"])
def _best_of_row(
    scores,
    seen_T,
    names,
    candidates,
    out_ids,
    out_scores,
    overflows,
    places,
    marks,
    width,
    limit,
    part_width,
    num_parts,
    out_width,
    candidates_width,
    unit,
    K: tl.constexpr,
    K_POWER: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each item: a part of a row; parts of the first row come first.

    Args:
        scores: fp32 [rows, width], of which `limit` count; TILE and 4 * GROUPS divide the width
            and the part_width. What is -inf does not count.
        seen_T: int32 [rows]. A row that sees no more than K has all of them, and its scores are
            not read. Others have scores for as many, if names is None.
        names, candidates: of the places, see `entries_of`; int32 [rows, width], int64 [rows, ..].
        out_ids: int64 [rows, out_width], -1 after the last; int32 [rows, out_width] of parts.
        out_scores: fp32 [rows, out_width] of parts, -inf after the last; None in the last pass.
        overflows: int32 [items], written: whether more was gathered than the buffer holds, and
            nothing was written out.
        places: int32 [items, CAPACITY].
        marks: uint8 [items, 4 * WORDS].
        unit: 1.
    """
    item = tl.program_id(0)
    places += item.to(tl.int64) * CAPACITY
    marks += item.to(tl.int64) * WORDS * 4
    row, part, first, stop, all_seen = part_of_row(
        item, seen_T, limit, part_width, num_parts, names is not None, K
    )
    row_scores = scores + row * width + first
    least = tl.full([], LEAST, tl.float32)
    if stop > CAPACITY:
        least = _lower_bound(row_scores, stop, K, GROUPS)
    held = 0
    for start in range(0, stop, 32 * WORDS):
        _mark(row_scores, start, tl.minimum(start + 32 * WORDS, stop), least, marks, TILE)
        tl.debug_barrier()
        held = _gather(marks, start, stop, unit, places, held, WORDS, CAPACITY)
        tl.debug_barrier()
    tl.store(overflows + item, (held > CAPACITY).to(tl.int32))
    # Few programs need the whole buffer, and half of it is handled in half the time.
    if (held > 0) & (held <= CAPACITY // 2):
        _finish(
            row_scores, places, unit, held, out_ids, out_scores, row, part, first,
            names, candidates, width, out_width, candidates_width, CAPACITY // 2, K, BLOCK,
        )  # fmt: skip
    elif (held > 0) & (held <= CAPACITY):
        _finish(
            row_scores, places, unit, held, out_ids, out_scores, row, part, first,
            names, candidates, width, out_width, candidates_width, CAPACITY, K, BLOCK,
        )  # fmt: skip
    write_rest(
        out_ids, out_scores, row, part, tl.minimum(held, K), all_seen, candidates, out_width,
        candidates_width, K, K_POWER, BLOCK,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes:
    groups: whose largest scores give the bound; at least K.
    tile: scores that are looked at at a time.
    words: of 32 scores that are gathered from at a time.
    capacity: of the buffer, at least K.
    warps, registers: of a program, of a thread at most.
    programs: that a multiprocessor runs at a time.
    part: places of a part of a row at least, where there are more programs than rows.
    """

    groups: int
    tile: int
    words: int
    capacity: int
    warps: int
    registers: int
    programs: int
    part: int


def sizes(topk: int) -> Sizes:
    if topk <= 512:
        return Sizes(1024, 4096, 1024, 2048, 8, 80, 3, 8192)
    return Sizes(4096, 8192, 1024, 4096, 16, 128, 1, 32768)


# For rows of odd scores: places at a time, buffer and warps.
_ODD_TILE, _ODD_CAPACITY, _ODD_WARPS = 2048, 4096, 16
LARGEST_K = 2048


def padded_width(limit: int, topk: int, form: Sizes | None = None) -> int:
    """Columns of scores that must be there for `limit` that count; the others may hold anything."""
    form = form or sizes(topk)
    step = max(4 * form.groups, form.tile)
    return max(1, -(-limit // step)) * step


def row_bytes(limit: int, topk: int) -> int:
    """Bytes of scores and of buffers that a row takes while its best are found."""
    return 4 * (padded_width(limit, topk) + sizes(topk).capacity + sizes(topk).words)


def best(
    launch: Launcher,
    topk: int,
    scores_TW: torch.Tensor,
    seen_T: torch.Tensor,
    limit: int,
    out_TK: torch.Tensor,
    candidates_TB: torch.Tensor | None = None,
    block: int = 1,
    form: Sizes | None = None,
) -> None:
    """Writes the numbers of the K best of the first `seen` scores of each row, in ascending order,
    then -1; NaN counts as the least number, and a score of -inf is never chosen unless the row
    sees no more than K.

    Args:
        scores_TW: fp32, dense, `padded_width(limit, topk)` columns.
        seen_T: int32, at most `limit`.
        out_TK: int64, dense.
        candidates_TB: the blocks that scores are of: column c is entry c % block of block
            c // block. Rows may lie apart.
    """
    form = form or sizes(topk)
    rows, names = len(scores_TW), None
    while True:
        parts, part_width = _split(launch, rows, limit, topk, form)
        out, out_scores = out_TK, None
        if parts > 1:
            shape = rows, padded_width(parts * topk, topk, form)
            out = scores_TW.new_empty(shape, dtype=torch.int32)
            out_scores = scores_TW.new_empty(shape)
        candidates = None if parts > 1 else candidates_TB
        arrays = (scores_TW, seen_T, names, candidates, out, out_scores)
        widths = (out.shape[1], 0 if candidates is None else candidates.stride(0))
        numbers = (scores_TW.shape[1], limit, part_width, parts, *widths)
        _reduce(launch, topk, form, arrays, numbers, rows * parts, block)
        if out_scores is None:
            return
        scores_TW, names, limit = out_scores, out, parts * topk


def _split(launch: Launcher, rows: int, limit: int, topk: int, form: Sizes) -> tuple[int, int]:
    """(parts of each row, their width), so that all multiprocessors have work; of a part much
    less must be left than it was."""
    wanted = -(-form.programs * launch.multiprocessors // max(rows, 1))
    width = max(-(-limit // wanted), form.part)
    if limit <= 2 * width:
        width = limit
    width = padded_width(width, topk, form)
    return max(1, -(-limit // width)), width


def _reduce(
    launch: Launcher,
    topk: int,
    form: Sizes,
    arrays: tuple[Any, ...],
    numbers: tuple[int, ...],
    items: int,
    block: int,
) -> None:
    scores_TW = arrays[0]
    overflows = scores_TW.new_empty(items, dtype=torch.int32)
    places = scores_TW.new_empty(items, form.capacity, dtype=torch.int32)
    named = {"K": topk, "K_POWER": next_power_of_2(topk), "BLOCK": block}
    launch(
        _best_of_row,
        (items,),
        *arrays,
        overflows,
        places,
        scores_TW.new_empty(items, 4 * form.words, dtype=torch.uint8),
        *numbers,
        1,
        **named,
        GROUPS=form.groups,
        TILE=form.tile,
        CAPACITY=form.capacity,
        WORDS=form.words,
        num_warps=form.warps,
        maxnreg=form.registers,
    )
    programs = min(items, launch.multiprocessors)
    places = scores_TW.new_empty(programs, _ODD_CAPACITY, dtype=torch.int32)
    launch(
        best_of_odd_row,
        (programs,),
        *arrays,
        overflows,
        places,
        torch.empty_like(places, dtype=torch.float32),
        *numbers,
        items,
        **named,
        TILE=_ODD_TILE,
        CAPACITY=_ODD_CAPACITY,
        num_warps=_ODD_WARPS,
    )
