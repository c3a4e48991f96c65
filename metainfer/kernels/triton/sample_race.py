"""Pieces of the draw: a row of logits tile by tile, weights, and the race of clocks.

One program has a row. A tile is [DEEP, WIDE]: each thread has all that lies in its columns, so that
a column is reduced without the other threads, and enough is on its way from memory at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.topk_cut import NOTHING, ordered_bits
from metainfer.ops.sample import WEIGHT_BITS

DEEP = tl.constexpr(4)
WARPS = 16
WIDE = tl.constexpr(4 * 32 * WARPS)
"""Columns of a tile: each thread loads four numbers that lie together."""
TILE = tl.constexpr(4 * 4 * 32 * WARPS)
_ONE = tl.constexpr(2.0**WEIGHT_BITS)


@triton.jit
def places_of(first):
    """int32 [DEEP, WIDE], the tokens of the tile that begins with `first`."""
    return first + tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@triton.jit
def scaled(x, most, inverse):
    return (x - most) * inverse


@triton.jit
def weight(x, most, inverse):
    """int64, of tokens of logits x; 0 for -inf."""
    return (tl.exp(scaled(x, most, inverse)) * _ONE).to(tl.int64)


@triton.jit
def order_of(x, most, inverse, margin):
    """uint32 in the order of logits; 0 of tokens that the margin drops."""
    return tl.where(scaled(x, most, inverse) >= margin, ordered_bits(x), 0)


@triton.jit
def is_kept(x, at, most, inverse, margin, bound, last):
    """Whether tokens are above the bound, or at it and no later than `last`."""
    ordered = order_of(x, most, inverse, margin).to(tl.int64)
    return (ordered > bound) | ((ordered == bound) & (at <= last))


@triton.jit
def _times(number, seed, position):
    """fp32, the clocks with these numbers."""
    block = (number // 4).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    nothing = tl.zeros_like(block)
    a, b, c, d = tl.philox(seed, block, nothing, nothing + low, nothing + high)
    odd, late = number % 2 == 1, number % 4 >= 2
    word = tl.where(late, tl.where(odd, d, c), tl.where(odd, b, a))
    v = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    series = ((((v / 6 + 0.2) * v + 0.25) * v + 1 / 3) * v + 0.5) * v + 1.0
    return tl.where(v < 1 / 16, series * v, -tl.log(1.0 - v))


@triton.jit
def race(
    logits, sums, most, inverse, margin, bound, last, seed, position,
    VOCAB: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr, POWER: tl.constexpr,
    AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """The token that wins.

    Args:
        logits: of the row.
        sums: int64 [STRETCHES], of the row, overwritten.
    """
    inside = tl.arange(0, STRETCH)
    for first in range(0, STRETCHES, AT_A_TIME):
        stretch = first + tl.arange(0, AT_A_TIME)
        at = stretch[:, None] * STRETCH + inside[None, :]
        x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
        kept = is_kept(x, at, most, inverse, margin, bound, last)
        w = tl.where(kept, weight(x, most, inverse), 0)
        tl.store(sums + stretch, tl.sum(w, 1), mask=stretch < STRETCHES)
    tl.debug_barrier()
    stretch = tl.arange(0, POWER)
    there = stretch < STRETCHES
    sum_of = tl.load(sums + stretch, mask=there, other=0).to(tl.float32)
    score = tl.div_rn(sum_of, _times(stretch, seed, position))
    winner = tl.argmax(tl.where(there, score, -1.0), 0)
    at = winner * STRETCH + inside
    x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
    kept = is_kept(x, at, most, inverse, margin, bound, last)
    w = tl.where(kept, weight(x, most, inverse), 0).to(tl.float32)
    score = tl.div_rn(w, _times(STRETCHES + inside, seed, position))
    return winner * STRETCH + tl.argmax(score, 0)
