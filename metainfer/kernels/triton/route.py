"""Routing in Triton: products of the rows with the gate, then the choice of experts in registers.

The gate is kept as bf16 parts that add up to it where rows are bf16 (`gate_parts`): products are
then exact, and the gate is off by 2^-18 of itself at most; a gate that is bf16 as it comes is one
part. Channels are split over programs where rows are few, and the second step adds the splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Variant, Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.ops.base import Target
from metainfer.ops.moe import RouteCase

_FEW_ROWS = 64
_PROGRAMS = 128  # among which the channels of few rows are split
_STEP = 128  # channels, of bf16
_NARROW_SPLITS = 8


class Gate(NamedTuple):
    """Parts [P, E, D] in the format of the rows, and what chooses: a bias [E] or a table
    [vocabulary, K]."""

    parts_PED: torch.Tensor
    choice: torch.Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows, experts and channels of a tile of products, and into how many parts channels are split.

    Attributes:
        slice: channels of a part, a multiple of the step.
        warps, stages: of programs that multiply.
        choosing: warps of programs that choose.
    """

    rows: int
    experts: int
    step: int
    splits: int
    slice: int
    warps: int
    stages: int
    choosing: int


CutFor: TypeAlias = Callable[[RouteCase, int], Cut]


def cut_of(case: RouteCase, rows: int) -> Cut:
    step = _STEP if case.dtype == "bfloat16" else _STEP // 4
    step = max(16, min(step, next_power_of_2(case.width)))
    experts = max(16, next_power_of_2(case.experts))
    if rows > _FEW_ROWS:
        slice_ = cdiv(case.width, step) * step
        return Cut(64, min(128, experts), max(16, step // 2), 1, slice_, 4, 3, 4)
    height, wide = max(16, next_power_of_2(rows)), min(64, experts)
    steps = cdiv(case.width, step)
    wanted = max(1, _PROGRAMS // cdiv(case.experts, wide))
    per_split = cdiv(steps, min(wanted, steps))
    splits = cdiv(steps, per_split)
    return Cut(height, wide, step, splits, per_split * step, 4, 3, 8 if splits > 1 else 4)


def narrow_cut_of(case: RouteCase, rows: int) -> Cut:
    """Of few rows: few experts and many channels a program, so that fewer parts are to be added up,
    and one warp that chooses, whose threads need not wait for each other."""
    cut = cut_of(case, rows)
    if rows > _FEW_ROWS:
        return cut
    steps = cdiv(case.width, cut.step)
    per_split = cdiv(steps, min(_NARROW_SPLITS, steps))
    splits = cdiv(steps, per_split)
    return replace(cut, experts=16, splits=splits, slice=per_split * cut.step, stages=4, choosing=1)


def gate_parts(case: RouteCase, gate_ED: torch.Tensor) -> torch.Tensor:
    """[P, E, D]: fp32 as it is for rows in fp32; else the nearest bf16 and, unless it is zero
    everywhere, the nearest of what is left."""
    if case.dtype == "float32":
        return gate_ED.float().unsqueeze(0).contiguous()
    near_ED = gate_ED.bfloat16()
    rest_ED = (gate_ED.float() - near_ED.float()).bfloat16()
    is_exact = gate_ED.dtype is torch.bfloat16 or not (rest_ED.is_meta or bool(rest_ED.any()))
    return torch.stack([near_ED] if is_exact else [near_ED, rest_ED])


def prepare(case: RouteCase, gate_ED: torch.Tensor, choice: torch.Tensor) -> Gate:
    return Gate(gate_parts(case, gate_ED), choice.contiguous())


@triton.jit(do_not_specialize=["rows"])
def route_logits(
    x_ptr,
    parts_ptr,
    logits_ptr,
    rows,
    x_stride,
    E: tl.constexpr,
    EP: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Products of a tile of rows and experts over a slice of channels -> [split, row, expert]."""
    r_B = tl.program_id(0) * BM + tl.arange(0, BM)
    e_E = tl.program_id(1) * BE + tl.arange(0, BE)
    split = tl.program_id(2)
    k_K = split * SLICE + tl.arange(0, BK)
    x_at = x_ptr + r_B.to(tl.int64)[:, None] * x_stride + k_K[None, :]
    w_at = parts_ptr + e_E[:, None] * D + k_K[None, :]
    acc = tl.zeros([BM, BE], tl.float32)
    for step in range(0, SLICE, BK):
        inside = (k_K + step < D)[None, :]
        x = tl.load(x_at + step, (r_B < rows)[:, None] & inside, 0.0)
        for part in tl.static_range(PARTS):
            w = tl.load(w_at + part * E * D + step, (e_E < E)[:, None] & inside, 0.0)
            if UPCAST:
                acc = tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), acc)
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    to = logits_ptr + (split * rows + r_B).to(tl.int64)[:, None] * EP + e_E[None, :]
    tl.store(to, acc, (r_B < rows)[:, None])


@triton.jit
def scores_of(logits, SIGMOID: tl.constexpr):
    """fp32 -> sigmoid, or sqrt(softplus)."""
    small = tl.exp(-tl.abs(logits))
    if SIGMOID:
        return tl.where(logits >= 0, 1.0, small) / (1.0 + small)
    else:
        # log(1 + small) as exact as small is: what the sum rounds away comes back by a quotient.
        sum_ = 1.0 + small
        log = tl.where(sum_ == 1.0, small, tl.log(sum_) * (small / tl.maximum(sum_ - 1.0, 1e-38)))
        return tl.sqrt(tl.maximum(logits, 0.0) + log)


@triton.jit
def within_groups(biased, R: tl.constexpr, EP: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr):
    """-inf for the experts of all groups but the KEPT ones whose two largest have the largest
    sums."""
    groups = tl.reshape(biased, (R, G, EP // G))
    place = tl.arange(0, EP // G)[None, None, :]
    first = tl.argmax(groups, 2)
    second = tl.where(place == first[:, :, None], float("-inf"), groups)
    best = tl.max(groups, 2) + tl.max(second, 2)
    kept = tl.zeros([R, G], tl.int32)
    group = tl.arange(0, G)[None, :]
    for _ in tl.static_range(KEPT):
        chosen = group == tl.argmax(best, 1)[:, None]
        kept = tl.where(chosen, 1, kept)
        best = tl.where(chosen, float("-inf"), best)
    return tl.reshape(tl.where(kept[:, :, None] == 1, groups, float("-inf")), (R, EP))


@triton.jit(do_not_specialize=["rows"])
def route_choose(
    logits_ptr,
    choice_ptr,
    tokens_ptr,
    padding_ptr,
    ids_ptr,
    weights_ptr,
    rows,
    factor,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SPLITS: tl.constexpr,
    SP: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    HASH: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATHER: tl.constexpr,
    R: tl.constexpr,
):
    """Adds the splits, scores, chooses by score and bias or by the table, and weighs.

    Args:
        GATHER: scores of the chosen are taken at once, not one by one as they are chosen.
    """
    r_R = tl.program_id(0) * R + tl.arange(0, R)
    e_E = tl.arange(0, EP)
    ok_R = r_R < rows
    at_RE = r_R.to(tl.int64)[:, None] * EP + e_E[None, :]
    if SPLITS == 1:
        logits = tl.load(logits_ptr + at_RE, ok_R[:, None], 0.0)
    else:
        s_S = tl.arange(0, SP)
        at_SRE = (s_S * rows).to(tl.int64)[:, None, None] * EP + at_RE[None, :, :]
        inside = (s_S < SPLITS)[:, None, None] & ok_R[None, :, None]
        logits = tl.sum(tl.load(logits_ptr + at_SRE, inside, 0.0), 0)
    scores = scores_of(logits, SIGMOID)
    ids = tl.zeros([R, KP], tl.int64)
    weights = tl.zeros([R, KP], tl.float32)
    k_K = tl.arange(0, KP)[None, :]
    if HASH:
        token_R = tl.load(tokens_ptr + r_R, ok_R, 0)
    else:
        bias = tl.load(choice_ptr + e_E, e_E < E, 0.0)
        biased = scores + bias[None, :]
        # NaN is worse than anything.
        listed = (e_E < E)[None, :] & (tl.abs(biased) < float("inf"))
        biased = tl.where(listed, biased, float("-inf"))
        if GROUPS > 1:
            biased = within_groups(biased, R, EP, GROUPS, KEPT)
    for k in tl.static_range(K):
        if HASH:
            id_R = tl.load(choice_ptr + token_R * K + k, ok_R, 0)
            chosen = e_E[None, :] == id_R[:, None]
        else:
            id_R = tl.argmax(biased, 1).to(tl.int64)
            chosen = e_E[None, :] == id_R[:, None]
            biased = tl.where(chosen, float("-inf"), biased)
        ids = tl.where(k_K == k, id_R[:, None], ids)
        if not GATHER:
            weight_R = tl.sum(tl.where(chosen, scores, 0.0), 1)
            weights = tl.where(k_K == k, weight_R[:, None], weights)
    if GATHER:
        weights = tl.where(k_K < K, tl.gather(scores, ids.to(tl.int32), 1), 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    to_RK = r_R.to(tl.int64)[:, None] * K + k_K
    listed = ok_R[:, None] & (k_K < K)
    if padding_ptr is not None:
        is_padding_R = tl.load(padding_ptr + r_R, ok_R, 0) != 0
        ids = tl.where(is_padding_R[:, None], -1, ids)
    tl.store(ids_ptr + to_RK, ids, listed)
    tl.store(weights_ptr + to_RK, weights * factor, listed)


def route_learned(
    launch: Launcher,
    case: RouteCase,
    gate: Gate,
    x_TD: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
    cut: Cut | None = None,
    cut_for: CutFor = cut_of,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cut` for experiments."""
    cut = cut or cut_for(case, len(x_TD))
    return _route(launch, case, gate, x_TD, None, padding_T1, cut)


def route_hash(
    launch: Launcher,
    case: RouteCase,
    gate: Gate,
    x_TD: torch.Tensor,
    token_ids_T: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
    cut_for: CutFor = cut_of,
) -> tuple[torch.Tensor, torch.Tensor]:
    cut = cut_for(case, len(x_TD))
    return _route(launch, case, gate, x_TD, token_ids_T, padding_T1, cut)


def _route(
    launch: Launcher,
    case: RouteCase,
    gate: Gate,
    x_TD: torch.Tensor,
    token_ids_T: torch.Tensor | None,
    padding_T1: torch.Tensor | None,
    cut: Cut,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(x_TD)
    padded = max(16, next_power_of_2(case.experts))
    logits = x_TD.new_empty(cut.splits, rows, padded, dtype=torch.float32)
    launch(
        route_logits,
        (cdiv(rows, cut.rows), cdiv(padded, cut.experts), cut.splits),
        x_TD,
        gate.parts_PED,
        logits,
        rows,
        x_TD.stride(0),
        num_warps=cut.warps,
        num_stages=cut.stages,
        E=case.experts,
        EP=padded,
        D=case.width,
        PARTS=len(gate.parts_PED),
        SLICE=cut.slice,
        BM=cut.rows,
        BE=cut.experts,
        BK=cut.step,
        UPCAST=launch.interpreted,
    )
    ids_TK = x_TD.new_empty(rows, case.selected, dtype=torch.int64)
    weights_TK = x_TD.new_empty(rows, case.selected, dtype=torch.float32)
    together = 1 if rows <= _FEW_ROWS else 4
    launch(
        route_choose,
        (cdiv(rows, together),),
        logits,
        gate.choice,
        token_ids_T,
        padding_T1,
        ids_TK,
        weights_TK,
        rows,
        float(case.scale),
        num_warps=cut.choosing,
        E=case.experts,
        EP=padded,
        K=case.selected,
        KP=next_power_of_2(case.selected),
        SPLITS=cut.splits,
        SP=next_power_of_2(cut.splits),
        GROUPS=case.groups,
        KEPT=case.group_topk,
        HASH=token_ids_T is not None,
        SIGMOID=case.score == "sigmoid",
        NORMALISE=case.normalise,
        GATHER=cut.choosing == 1,
        R=together,
    )
    return ids_TK, weights_TK


def eligible(case: RouteCase, target: Target) -> Verdict:
    padded = max(16, next_power_of_2(case.experts))
    if case.groups > 1 and padded != case.experts:
        return no(f"groups experts where they are a power of two, not {case.experts}")
    return on_gpu(case, target)


def _narrow(run: Callable[..., Any]) -> dict[str, Variant]:
    return {"narrow": Variant(partial(_at, run), _FEW_ROWS)}


def _at(run: Callable[..., Any], *arguments: Any) -> Any:
    return run(*arguments, cut_for=narrow_cut_of)


BACKENDS = (
    Declared("moe.route_hash", route_hash, eligible, prepare, variants=_narrow(route_hash)),
    Declared(
        "moe.route_learned", route_learned, eligible, prepare, variants=_narrow(route_learned)
    ),
)
