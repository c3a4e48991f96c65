"""Pieces of the exact choice of the K best, and the slow way to it that suits any scores."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.4028234663852886e38)
NOTHING = tl.constexpr(float("-inf"))

SIZES = ("limit", "num_parts", "candidates_width")
"""Parameters of kernels that the compiler is not to know."""


@triton.jit
def ordered_bits(x):
    """fp32 that is no NaN -> uint32 in the same order; both zeros alike."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def number_of(ordered):
    """The inverse of `ordered_bits`."""
    bits = ordered.to(tl.int32, bitcast=True)
    return (bits ^ (((bits >> 31) ^ -1) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def reached_by(ordered, is_there, held, k, MOST_ROUNDS: tl.constexpr):
    """(bound, how many reach it): the k-th largest, or a little less where the rounds do not
    suffice. It is found bit by bit, which ends early where a bound separates k numbers.

    Args:
        ordered: uint32, 0 where none is there.
        held: how many are there, at least k.
    """
    high = tl.max(ordered, 0).to(tl.int64)
    low = tl.min(tl.where(is_there, ordered, 0xFFFFFFFF), 0).to(tl.int64)
    # The highest bit in which any two differ, or one above; -1 where none does.
    power = (high ^ low).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    bit = tl.maximum(tl.minimum(power - 127, 31), -1)
    bound = (high >> (bit + 1)) << (bit + 1)
    stop = tl.maximum(bit - MOST_ROUNDS, -1)
    count = held
    while (bit > stop) & (count > k):
        trial = bound + (tl.full([], 1, tl.int64) << bit)
        reach = tl.sum((ordered >= trial.to(tl.uint32)).to(tl.int32), 0)
        bound = tl.where(reach >= k, trial, bound)
        count = tl.where(reach >= k, reach, count)
        bit -= 1
    return bound.to(tl.uint32), count


@triton.jit
def cut(ordered, is_there, held, kept):
    """(flags, bound): which of the numbers that are there are the `kept` best, the first among
    equals, as int32; and the last of them."""
    bound, count = reached_by(ordered, is_there, held, kept, 32)
    flags = (is_there & (ordered >= bound)).to(tl.int32)
    if count > kept:
        equal = (is_there & (ordered == bound)).to(tl.int32)
        surplus = tl.cumsum(equal, 0) > kept - count + tl.sum(equal, 0)
        flags = tl.where((equal > 0) & surplus, 0, flags)
    return flags, bound


@triton.jit
def entries_of(places, names, candidates, BLOCK: tl.constexpr, mask):
    """What places of a row are called, int64.

    Args:
        names: int32, of the row; None where places are called by themselves.
        candidates: int64, of the row: place p is number p % BLOCK of block p // BLOCK; or None.
    """
    if names is not None:
        places = tl.load(names + places, mask=mask, other=0)
    entries = places.to(tl.int64)
    if candidates is not None:
        blocks = tl.load(candidates + places // BLOCK, mask=mask, other=0)
        entries = blocks * BLOCK + places % BLOCK
    return entries


@triton.jit
def write_best(
    out_ids, out_scores, row, part, x, place, flags, names, candidates,
    width, out_width, candidates_width, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes what is flagged of a part of a row."""
    if names is not None:
        names += row * width
    if candidates is not None:
        candidates += row * candidates_width
    to = row * out_width + part * K + tl.cumsum(flags, 0) - flags
    tl.store(out_ids + to, entries_of(place, names, candidates, BLOCK, flags > 0), mask=flags > 0)
    if out_scores is not None:
        tl.store(out_scores + to, x, mask=flags > 0)


@triton.jit
def write_rest(
    out_ids, out_scores, row, part, kept, all_seen, candidates,
    out_width, candidates_width,
    K: tl.constexpr, K_POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes what comes after the `kept` best of a part: nothing; or the first `all_seen` places of
    the row, if there are any."""
    rank = tl.arange(0, K_POWER)
    is_rest = (rank >= kept) & (rank < K)
    to = row * out_width + part * K + rank
    if out_scores is not None:
        tl.store(out_scores + to, NOTHING, mask=is_rest)
    else:
        if candidates is not None:
            candidates += row * candidates_width
        is_one = rank < all_seen
        entries = tl.where(is_one, entries_of(rank, None, candidates, BLOCK, is_one), -1)
        tl.store(out_ids + to, entries, mask=is_rest)


@triton.jit
def part_of_row(
    item, seen_T, limit, part_width, num_parts, IS_NAMED: tl.constexpr, K: tl.constexpr
):
    """Of an item: row, part, the first place, how many places there are to look at, and how many
    the row sees if it has them all without a look."""
    row = (item // num_parts).to(tl.int64)
    part = item % num_parts
    first = part * part_width
    seen = tl.load(seen_T + row)
    stop = tl.minimum(limit - first, part_width)
    if not IS_NAMED:
        stop = tl.minimum(stop, seen - first)
    stop = tl.where(seen <= K, 0, tl.maximum(stop, 0))
    return row, part, first, stop, tl.where(seen <= K, seen, 0)


@triton.jit
def _best_by_cuts(
    item, scores, seen_T, names, candidates, out_ids, out_scores, overflows,
    buffer_places, buffer_scores, width, limit, part_width, num_parts, out_width,
    candidates_width,
    K: tl.constexpr, K_POWER: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One item, if it overflowed: gathers tile after tile and cuts the buffer down when a tile more
    might not fit."""
    row, part, first, stop, all_seen = part_of_row(
        item, seen_T, limit, part_width, num_parts, names is not None, K
    )
    row_scores = scores + row * width + first
    tile = tl.arange(0, TILE)
    slot = tl.arange(0, CAPACITY)
    least = tl.full([], LEAST, tl.float32)
    held = 0
    steps = tl.where(tl.load(overflows + item) > 0, tl.cdiv(stop, TILE) + 1, 0)
    for step in range(0, steps):
        is_last = step == steps - 1
        if not is_last:
            place = step * TILE + tile
            x = tl.load(row_scores + place)
            x = tl.where(x >= NOTHING, x, LEAST)
            enters = (x >= least) & (place < stop)
            flags = enters.to(tl.int32)
            to = held + tl.cumsum(flags, 0) - flags
            tl.store(buffer_scores + to, x, mask=enters)
            tl.store(buffer_places + to, first + place, mask=enters)
            held += tl.sum(flags, 0)
        if (held > CAPACITY - TILE) | is_last:
            tl.debug_barrier()
            is_there = slot < held
            ordered = tl.where(is_there, ordered_bits(tl.load(buffer_scores + slot)), 0)
            kept = tl.minimum(held, K)
            flags, bound = cut(ordered, is_there, held, kept)
            place = tl.load(buffer_places + slot)
            tl.debug_barrier()
            if is_last:
                write_best(
                    out_ids, out_scores, row, part, number_of(ordered), place, flags, names,
                    candidates, width, out_width, candidates_width, K, BLOCK,
                )  # fmt: skip
                write_rest(
                    out_ids, out_scores, row, part, kept, all_seen, candidates, out_width,
                    candidates_width, K, K_POWER, BLOCK,
                )  # fmt: skip
            else:
                to = tl.cumsum(flags, 0) - flags
                tl.store(buffer_scores + to, number_of(ordered), mask=flags > 0)
                tl.store(buffer_places + to, place, mask=flags > 0)
                held = kept
                # What comes later has to be better, not as good.
                least = number_of(bound + 1)
            tl.debug_barrier()


@triton.jit(do_not_specialize=[*SIZES, "num_items"], do_not_specialize_on_alignment=["candidates"])
def best_of_odd_row(
    scores,
    seen_T,
    names,
    candidates,
    out_ids,
    out_scores,
    overflows,
    buffer_places,
    buffer_scores,
    width,
    limit,
    part_width,
    num_parts,
    out_width,
    candidates_width,
    num_items,
    K: tl.constexpr,
    K_POWER: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `_best_of_row`, but each program takes several items, only those that overflowed. K and
    TILE fit into CAPACITY; the buffers are [programs, CAPACITY].
    """
    buffer_scores += tl.program_id(0) * CAPACITY
    buffer_places += tl.program_id(0) * CAPACITY
    several = tl.program_id(0) + tl.arange(0, 128) * tl.num_programs(0)
    for start in range(0, num_items, 128 * tl.num_programs(0)):
        odd = tl.load(overflows + start + several, mask=start + several < num_items, other=0)
        stop = tl.where(
            tl.max(odd, 0) > 0, tl.minimum(start + 128 * tl.num_programs(0), num_items), 0
        )
        for item in range(start + tl.program_id(0), stop, tl.num_programs(0)):
            _best_by_cuts(
                item, scores, seen_T, names, candidates, out_ids, out_scores, overflows,
                buffer_places, buffer_scores, width, limit, part_width, num_parts, out_width,
                candidates_width, K, K_POWER, TILE, CAPACITY, BLOCK,
            )  # fmt: skip
