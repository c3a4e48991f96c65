"""Sampling of a batch, one program for each row, whatever the other rows ask for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher, next_power_of_2
from metainfer.kernels.triton.sample_cut import bound_of_kept
from metainfer.kernels.triton.sample_race import DEEP, TILE, WARPS, WIDE, places_of, race
from metainfer.kernels.triton.topk_cut import NOTHING
from metainfer.ops.sample import NOT_FINITE, NOTHING_LEFT, SampleCase

_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)
_LIST = 256
"""Entries of a list that are taken at a time."""
_RECENT = 8
"""Recent tokens at least that a program has room for, so that their number compiles nothing."""


@triton.jit(do_not_specialize=["recent_stride", "num_recent"])
def _adjust(
    logits,
    starts_R5,
    ids,
    values,
    recent_RP,
    factors_R3,
    out,
    recent_stride,
    num_recent,
    VOCAB: tl.constexpr,
    LIST: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Barriers are between threads that write to a place and others that read it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    out += row * VOCAB
    starts = starts_R5 + row * 5
    allowed, banned = tl.load(starts), tl.load(starts + 1)
    biased, seen, end = tl.load(starts + 2), tl.load(starts + 3), tl.load(starts + 4)
    for first in range(0, VOCAB, TILE):
        at = places_of(first)
        x = tl.load(logits + at, mask=at < VOCAB)
        tl.store(out + at, tl.where(allowed < banned, NOTHING, x), mask=at < VOCAB)
    tl.debug_barrier()
    lane = tl.arange(0, LIST)
    for first in range(allowed, banned, LIST):
        there = first + lane < banned
        at = tl.load(ids + first + lane, mask=there, other=0)
        tl.store(out + at, tl.load(logits + at, mask=there), mask=there)
    tl.debug_barrier()
    for first in range(banned, biased, LIST):
        there = first + lane < biased
        at = tl.load(ids + first + lane, mask=there, other=0)
        tl.store(out + at, NOTHING, mask=there)
    tl.debug_barrier()
    for first in range(biased, seen, LIST):
        there = first + lane < seen
        at = tl.load(ids + first + lane, mask=there, other=0)
        bias = tl.load(values + first + lane, mask=there)
        tl.store(out + at, tl.load(out + at, mask=there) + bias, mask=there)
    tl.debug_barrier()

    factors = factors_R3 + row * 3
    repetition, frequency, presence = (
        tl.load(factors), tl.load(factors + 1), tl.load(factors + 2),
    )  # fmt: skip
    listed = tl.zeros([ROOM], tl.int32)
    number = tl.arange(0, ROOM)
    recent = tl.load(recent_RP + row * recent_stride + number, mask=number < num_recent, other=-1)
    for first in range(seen, end, LIST):
        there = first + lane < end
        at = tl.load(ids + first + lane, mask=there, other=0)
        hits = ((at[:, None] == recent[None, :]) & there[:, None]).to(tl.int32)
        listed = tl.maximum(listed, tl.max(hits, 0))
        count = tl.load(values + first + lane, mask=there, other=0.0)
        count += tl.sum(hits, 1).to(tl.float32)
        x = tl.load(out + at, mask=there, other=0.0)
        tl.store(out + at, _penalised(x, count, repetition, frequency, presence), mask=there)
    tl.debug_barrier()
    if num_recent > 0:
        same = recent[:, None] == recent[None, :]
        first_of_all = tl.sum((same & (number[None, :] < number[:, None])).to(tl.int32), 1) == 0
        penalised = tl.abs(repetition - 1.0) + tl.abs(frequency) + tl.abs(presence)
        there = (recent >= 0) & (listed == 0) & first_of_all
        there &= tl.zeros_like(recent) + penalised > 0
        x = tl.load(out + recent, mask=there, other=0.0)
        count = tl.sum(same.to(tl.int32), 1).to(tl.float32)
        x = _penalised(x, count, repetition, frequency, presence)
        tl.store(out + recent, x, mask=there)


@triton.jit
def _penalised(x, count, repetition, frequency, presence):
    x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    return x - frequency * count - tl.where(count > 0, presence, 0.0)


def adjust(
    launch: Launcher,
    case: SampleCase,
    logits_RV: torch.Tensor,
    starts_R5: torch.Tensor,
    ids_N: torch.Tensor,
    values_N: torch.Tensor,
    recent_RP: torch.Tensor,
    factors_R3: torch.Tensor,
) -> torch.Tensor:
    rows, recent = recent_RP.shape
    adjusted_RV = torch.empty_like(logits_RV)
    launch(
        _adjust,
        (rows,),
        logits_RV,
        starts_R5,
        ids_N,
        values_N,
        recent_RP,
        factors_R3,
        adjusted_RV,
        recent_RP.stride(0),
        recent,
        VOCAB=case.vocab,
        LIST=_LIST,
        ROOM=max(_RECENT, next_power_of_2(recent)),
        num_warps=WARPS,
    )
    return adjusted_RV


@triton.jit
def _likeliest(logits, raw, VOCAB: tl.constexpr):
    """(greatest logit, the lowest token that has it, whether a number of `raw`, if it is not None,
    or else of the logits is not finite)."""
    best = tl.full([DEEP, WIDE], NOTHING, tl.float32)
    best_at = tl.zeros([DEEP, WIDE], tl.int32)
    odd = tl.zeros([DEEP, WIDE], tl.int32)
    for first in range(0, VOCAB, TILE):
        at = places_of(first)
        x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
        made = x
        if raw is not None:
            made = tl.load(raw + at, mask=at < VOCAB, other=0.0)
        odd |= ((tl.abs(made) < float("inf")) | (at >= VOCAB)).to(tl.int32) ^ 1
        better = x > best
        best = tl.where(better, x, best)
        best_at = tl.where(better, at, best_at)
    most = tl.max(tl.max(best, 0), 0)
    token = tl.min(tl.min(tl.where(best == most, best_at, VOCAB), 0), 0)
    return most, token, tl.max(tl.max(odd, 0), 0)


@triton.jit(do_not_specialize=["rows"])
def _draw(
    logits,
    adjusted,
    rules_R3,
    numbers_R3,
    sums,
    out_2R,
    rows,
    VOCAB: tl.constexpr,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
    POWER: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """adjusted is None where no row changes its logits, rules_R3 where all rows are greedy."""
    row = tl.program_id(0).to(tl.int64)
    x, raw = logits + row * VOCAB, None
    if adjusted is not None:
        x, raw = adjusted + row * VOCAB, logits + row * VOCAB
    most, token, odd = _likeliest(x, raw, VOCAB)
    error = tl.where(odd > 0, _NOT_FINITE, tl.where(most == NOTHING, _NOTHING_LEFT, 0))
    if rules_R3 is not None:
        inverse = tl.load(rules_R3 + row * 3)
        if (inverse > 0.0) & (error == 0):
            margin = tl.load(rules_R3 + row * 3 + 2)
            bound, last = tl.full([], 0, tl.int64), tl.full([], VOCAB, tl.int32)
            if FILTERS:
                top_p, top_k = tl.load(rules_R3 + row * 3 + 1), tl.load(numbers_R3 + row * 3)
                bound, last = bound_of_kept(x, most, inverse, margin, top_k, top_p, VOCAB)
            seed, position = tl.load(numbers_R3 + row * 3 + 1), tl.load(numbers_R3 + row * 3 + 2)
            token = race(
                x, sums + row * STRETCHES, most, inverse, margin, bound, last, seed, position,
                VOCAB, STRETCH, STRETCHES, POWER, AT_A_TIME,
            )  # fmt: skip
    tl.store(out_2R + row, tl.where(error == 0, token, 0).to(tl.int64))
    tl.store(out_2R + rows + row, error.to(tl.int64))


def draw(
    launch: Launcher,
    case: SampleCase,
    logits_RV: torch.Tensor,
    adjusted_RV: torch.Tensor | None,
    rules_R3: torch.Tensor | None,
    numbers_R3: torch.Tensor | None,
    filters: bool,
) -> torch.Tensor:
    rows = len(logits_RV)
    drawn_2R = logits_RV.new_empty(2, rows, dtype=torch.int64)
    sums_RG = None
    if rules_R3 is not None:
        sums_RG = logits_RV.new_empty(rows, case.stretches, dtype=torch.int64)
    launch(
        _draw,
        (rows,),
        logits_RV,
        adjusted_RV,
        rules_R3,
        numbers_R3,
        sums_RG,
        drawn_2R,
        rows,
        VOCAB=case.vocab,
        STRETCH=case.stretch,
        STRETCHES=case.stretches,
        POWER=next_power_of_2(case.stretches),
        AT_A_TIME=max(1, 4096 // case.stretch),
        FILTERS=filters,
        num_warps=WARPS,
    )
    return drawn_2R


@triton.jit(do_not_specialize=["top"])
def _logprobs(
    logits,
    tokens_R,
    own_R,
    tops_RK,
    top_tokens_RK,
    top,
    VOCAB: tl.constexpr,
):
    """After the norm, a pass for each of the likeliest: the best of those behind the last one."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    best = tl.full([DEEP, WIDE], NOTHING, tl.float32)
    for first in range(0, VOCAB, TILE):
        at = places_of(first)
        best = tl.maximum(best, tl.load(logits + at, mask=at < VOCAB, other=NOTHING))
    most = tl.max(tl.max(best, 0), 0)
    sums = tl.zeros([DEEP, WIDE], tl.float32)
    for first in range(0, VOCAB, TILE):
        at = places_of(first)
        sums += tl.exp(tl.load(logits + at, mask=at < VOCAB, other=NOTHING) - most)
    norm = most + tl.log(tl.sum(tl.sum(sums, 0), 0))
    tl.store(own_R + row, tl.load(logits + tl.load(tokens_R + row)) - norm)
    last = tl.full([], float("inf"), tl.float32)
    last_at = tl.full([], -1, tl.int32)
    for k in range(0, top):
        best = tl.full([DEEP, WIDE], NOTHING, tl.float32)
        best_at = tl.zeros([DEEP, WIDE], tl.int32)
        for first in range(0, VOCAB, TILE):
            at = places_of(first)
            x = tl.load(logits + at, mask=at < VOCAB, other=NOTHING)
            behind = (x < last) | ((x == last) & (at > last_at))
            better = behind & (x > best)
            best = tl.where(better, x, best)
            best_at = tl.where(better, at, best_at)
        last = tl.max(tl.max(best, 0), 0)
        last_at = tl.min(tl.min(tl.where(best == last, best_at, VOCAB - 1), 0), 0)
        tl.store(tops_RK + row * top + k, last - norm)
        tl.store(top_tokens_RK + row * top + k, last_at.to(tl.int64))


def logprobs(
    launch: Launcher, case: SampleCase, logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = len(logits_RV)
    own_R = logits_RV.new_empty(rows)
    tops_RK = logits_RV.new_empty(rows, top)
    top_tokens_RK = logits_RV.new_empty(rows, top, dtype=torch.int64)
    arrays = (logits_RV, tokens_R, own_R, tops_RK, top_tokens_RK)
    launch(_logprobs, (rows,), *arrays, top, VOCAB=case.vocab, num_warps=WARPS)
    return own_R, tops_RK, top_tokens_RK


BACKENDS = (
    Declared("sample.adjust", adjust),
    Declared("sample.draw", draw),
    Declared("sample.logprobs", logprobs),
)
