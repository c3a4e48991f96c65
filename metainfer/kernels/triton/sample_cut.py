"""Which tokens of a row top_k and top_p keep: the search for the bound of what is kept.

Each pass over the row tries three bounds at once and leaves a quarter of the range, until one
number is left in it, or one token: then the bound separates what is kept from what is not, but for
tokens with equal logits, of which the first are kept. Logits that differ are soon apart where the
range of numbers is divided; where that takes long, the range of their bits is, which has an end.
Sums of weights are of whole numbers: exact, in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.sample_race import TILE, WIDE, order_of, places_of, weight
from metainfer.kernels.triton.topk_cut import NOTHING, number_of, ordered_bits

ALL = tl.constexpr(1 << 30)
"""More tokens than there are."""
_WEIGHTLESS = tl.constexpr(29.0)
"""exp(-29) * 2^40 is below 1: tokens whose scaled logit is so far below the greatest are never
drawn, and it makes no difference whether they are kept."""
_BY_NUMBER = tl.constexpr(8)
"""Passes that divide the range of numbers: it is then 2^-16 of what it was."""


@triton.jit
def _measured(
    logits, most, inverse, margin, bound, VOCAB: tl.constexpr, BY_WEIGHT: tl.constexpr
):  # fmt: skip
    """(how many tokens reach the bound, what they amount to): their weight, or again how many."""
    count = tl.zeros([WIDE], tl.int32)
    amount = tl.zeros([WIDE], tl.int64)
    for first in range(0, VOCAB, TILE):
        at = places_of(first)
        x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
        ordered = order_of(x, most, inverse, margin).to(tl.int64)
        reach = (ordered >= bound) & (at < VOCAB)
        count += tl.sum(reach.to(tl.int32), 0)
        if BY_WEIGHT:
            amount += tl.sum(tl.where(reach, weight(x, most, inverse), 0), 0)
    counted = tl.sum(count, 0)
    if BY_WEIGHT:
        return counted, tl.sum(amount, 0)
    return counted, counted.to(tl.int64)


@triton.jit
def _measured_thrice(
    logits, most, inverse, margin, bound_1, bound_2, bound_3,
    VOCAB: tl.constexpr, BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """As `_measured`, of three bounds."""
    count_1 = tl.zeros([WIDE], tl.int32)
    count_2 = tl.zeros([WIDE], tl.int32)
    count_3 = tl.zeros([WIDE], tl.int32)
    amount_1 = tl.zeros([WIDE], tl.int64)
    amount_2 = tl.zeros([WIDE], tl.int64)
    amount_3 = tl.zeros([WIDE], tl.int64)
    for first in range(0, VOCAB, TILE):
        at = places_of(first)
        x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
        ordered = tl.where(at < VOCAB, order_of(x, most, inverse, margin), 0).to(tl.int64)
        reach_1, reach_2, reach_3 = ordered >= bound_1, ordered >= bound_2, ordered >= bound_3
        count_1 += tl.sum(reach_1.to(tl.int32), 0)
        count_2 += tl.sum(reach_2.to(tl.int32), 0)
        count_3 += tl.sum(reach_3.to(tl.int32), 0)
        if BY_WEIGHT:
            w = weight(x, most, inverse)
            amount_1 += tl.sum(tl.where(reach_1, w, 0), 0)
            amount_2 += tl.sum(tl.where(reach_2, w, 0), 0)
            amount_3 += tl.sum(tl.where(reach_3, w, 0), 0)
    counted_1, counted_2, counted_3 = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
    if BY_WEIGHT:
        return (
            counted_1, counted_2, counted_3,
            tl.sum(amount_1, 0), tl.sum(amount_2, 0), tl.sum(amount_3, 0),
        )  # fmt: skip
    return (
        counted_1, counted_2, counted_3,
        counted_1.to(tl.int64), counted_2.to(tl.int64), counted_3.to(tl.int64),
    )  # fmt: skip


@triton.jit
def _quarters(low, high, by_number):
    """Bounds between low, which they are above, and high, which they may be; ascending."""
    step = (high - low) // 4 + 1
    bound_1, bound_2, bound_3 = low + step, low + 2 * step, low + 3 * step
    if by_number:
        from_x = number_of(low.to(tl.uint32))
        quarter = (number_of(high.to(tl.uint32)) - from_x) * 0.25
        bound_1 = ordered_bits(from_x + quarter).to(tl.int64)
        bound_2 = ordered_bits(from_x + 2 * quarter).to(tl.int64)
        bound_3 = ordered_bits(from_x + 3 * quarter).to(tl.int64)
    bound_1 = tl.minimum(tl.maximum(bound_1, low + 1), high)
    bound_2 = tl.minimum(tl.maximum(bound_2, bound_1), high)
    return bound_1, bound_2, tl.minimum(tl.maximum(bound_3, bound_2), high)


@triton.jit
def _search(
    logits, most, inverse, margin, low, high, reach, wanted,
    VOCAB: tl.constexpr, BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """(bound, whether tokens at it are one number, tokens above it, what these amount to).

    The greatest number is looked for at and above which tokens amount to what is wanted. Where only
    one token is left at or above the bound found and below what is known to be too high, it is that
    number's, whatever it is.

    Args:
        low, high: int64, of finite numbers. What reaches low amounts to enough; what is above high
            does not.
        reach: int32, tokens that reach low.
    """
    above = tl.full([], 0, tl.int32)
    amount_above = tl.full([], 0, tl.int64)
    passes = tl.full([], 0, tl.int32)
    while (low < high) & (reach - above > 1):
        bound_1, bound_2, bound_3 = _quarters(low, high, passes < _BY_NUMBER)
        passes += 1
        count_1, count_2, count_3, amount_1, amount_2, amount_3 = _measured_thrice(
            logits, most, inverse, margin, bound_1, bound_2, bound_3, VOCAB, BY_WEIGHT
        )
        if amount_3 >= wanted:
            low, reach = bound_3, count_3
        elif amount_2 >= wanted:
            low, reach = bound_2, count_2
            high, above, amount_above = bound_3 - 1, count_3, amount_3
        elif amount_1 >= wanted:
            low, reach = bound_1, count_1
            high, above, amount_above = bound_2 - 1, count_2, amount_2
        else:
            high, above, amount_above = bound_1 - 1, count_1, amount_1
    return low, low == high, above, amount_above


@triton.jit
def _place_of_tie(logits, most, inverse, margin, bound, room, VOCAB: tl.constexpr):
    """The token of number `room`, from 1 on, of those at the bound."""
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], VOCAB, tl.int32)
    lane = tl.arange(0, WIDE)
    for first in range(0, VOCAB, WIDE):
        at = first + lane
        x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
        ordered = tl.where(at < VOCAB, order_of(x, most, inverse, margin), 0).to(tl.int64)
        ties = (ordered == bound).to(tl.int32)
        count = seen + tl.cumsum(ties, 0)
        here = tl.min(tl.where((ties > 0) & (count == room), at, VOCAB), 0)
        last = tl.minimum(last, here)
        seen += tl.sum(ties, 0)
    return last


@triton.jit
def bound_of_kept(logits, most, inverse, margin, top_k, top_p, VOCAB: tl.constexpr):
    """(bound, last): kept are the tokens above the bound, int64, and at it up to the token `last`;
    see `sample_race.is_kept`. `top_k` is int64, 0 for all."""
    high = ordered_bits(most).to(tl.int64)
    bound = ordered_bits(most - _WEIGHTLESS / inverse).to(tl.int64)
    room = tl.full([], ALL, tl.int32)
    reach, amount = _measured(logits, most, inverse, margin, bound, VOCAB, True)
    if (top_k > 0) & (top_k < reach):
        bound, is_one, above, _ = _search(
            logits, most, inverse, margin, bound, high, reach, top_k, VOCAB, False
        )
        if is_one:
            room = top_k.to(tl.int32) - above
        reach = top_k.to(tl.int32)
        if top_p < 1.0:
            count_above, amount = _measured(
                logits, most, inverse, margin, bound + is_one.to(tl.int64), VOCAB, True
            )
            if is_one:
                amount += (reach - count_above) * weight(
                    number_of(bound.to(tl.uint32)), most, inverse
                )
    if top_p < 1.0:
        wanted = (amount.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        wanted = tl.maximum(wanted, 1)
        before = bound
        bound, is_one, above, amount_above = _search(
            logits, most, inverse, margin, bound, high, reach, wanted, VOCAB, True
        )
        room = tl.where(bound > before, ALL, room)
        if is_one:
            each = tl.maximum(weight(number_of(bound.to(tl.uint32)), most, inverse), 1)
            needed = (wanted - amount_above + each - 1) // each
            room = tl.minimum(room.to(tl.int64), needed).to(tl.int32)
    last = tl.full([], VOCAB, tl.int32)
    if room < ALL:
        last = _place_of_tie(logits, most, inverse, margin, bound, room, VOCAB)
    return bound, last
