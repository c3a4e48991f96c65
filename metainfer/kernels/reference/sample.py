"""Sampling, plainly: rows are sorted.

Shape suffixes: R rows, N random rows, V tokens, G stretches of L tokens, P recent tokens.
"""

from __future__ import annotations

import torch

from metainfer.kernels.reference.clocks import clocks
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.sample import NOT_FINITE, NOTHING_LEFT, WEIGHT_BITS, SampleCase


def adjust(
    case: SampleCase,
    logits_RV: torch.Tensor,
    starts_R5: torch.Tensor,
    ids_N: torch.Tensor,
    values_N: torch.Tensor,
    recent_RP: torch.Tensor,
    factors_R3: torch.Tensor,
) -> torch.Tensor:
    """Entry by entry of the lists, all rows at once."""
    rows, vocab = logits_RV.shape
    place_N = torch.arange(len(ids_N), device=ids_N.device)
    row_N = torch.searchsorted(starts_R5[:, 4].contiguous(), place_N, right=True)
    row_N = row_N.clamp_max(max(rows - 1, 0))
    # 0: allowed, 1: banned, 2: bias, 3: seen
    kind_N = (place_N[:, None] >= starts_R5[row_N, 1:4]).sum(-1)
    at_N = row_N * vocab + ids_N

    adjusted_RV = logits_RV.clone()
    adjusted_RV[starts_R5[:, 1] > starts_R5[:, 0]] = -torch.inf
    flat = adjusted_RV.view(-1)
    allowed = at_N[kind_N == 0]
    flat[allowed] = logits_RV.reshape(-1)[allowed]
    flat[at_N[kind_N == 1]] = -torch.inf
    flat.index_add_(0, at_N[kind_N == 2], values_N[kind_N == 2])

    # Recent tokens are added to the seen ones; where one is in both, they are one.
    is_seen = kind_N == 3
    penalised_R = (factors_R3 != torch.tensor([1.0, 0.0, 0.0], device=flat.device)).any(-1)
    is_recent_RP = (recent_RP >= 0) & penalised_R[:, None]
    recent_row_RP = torch.arange(rows, device=flat.device)[:, None].expand_as(recent_RP)
    recent = (recent_row_RP * vocab + recent_RP)[is_recent_RP]
    counts = torch.cat([values_N[is_seen], torch.ones_like(recent, dtype=torch.float32)])
    at, entry = torch.cat([at_N[is_seen], recent]).unique(return_inverse=True)
    count = torch.zeros(len(at), device=flat.device).index_add_(0, entry, counts)
    repetition, frequency, presence = factors_R3[at // vocab].unbind(-1)
    x = flat[at]
    x = torch.where(x > 0, x / repetition, x * repetition)
    flat[at] = x - frequency * count - presence * (count > 0)
    return adjusted_RV


def draw(
    case: SampleCase,
    logits_RV: torch.Tensor,
    adjusted_RV: torch.Tensor | None,
    rules_R3: torch.Tensor | None,
    numbers_R3: torch.Tensor | None,
    filters: bool,
) -> torch.Tensor:
    x_RV = logits_RV if adjusted_RV is None else adjusted_RV
    errors_R = row_errors(logits_RV, x_RV)
    tokens_R = x_RV.argmax(-1)  # the first of equal ones
    if rules_R3 is not None and numbers_R3 is not None:
        y_RV = scaled(x_RV, rules_R3)
        w_RV = weights(y_RV)
        w_RV = torch.where(_kept(x_RV, y_RV, w_RV, rules_R3, numbers_R3), w_RV, 0)
        drawn_R = race(case, w_RV, numbers_R3)
        tokens_R = torch.where(rules_R3[:, 0] > 0, drawn_R, tokens_R)
    return torch.stack([torch.where(errors_R == 0, tokens_R, 0), errors_R])


def row_errors(logits_RV: torch.Tensor, x_RV: torch.Tensor) -> torch.Tensor:
    """int64 [R]: why a row has no token, or 0."""
    is_finite_R = logits_RV.isfinite().all(-1)
    is_left_R = (x_RV > -torch.inf).any(-1)
    return torch.where(is_finite_R, torch.where(is_left_R, 0, NOTHING_LEFT), NOT_FINITE)


def scaled(x_RV: torch.Tensor, rules_R3: torch.Tensor) -> torch.Tensor:
    """y; 0 in rows of errors."""
    y_RV = (x_RV - x_RV.amax(-1, keepdim=True)) * rules_R3[:, :1]
    return y_RV.nan_to_num_(nan=0.0, posinf=0.0)


def weights(y_RV: torch.Tensor) -> torch.Tensor:
    return (y_RV.exp() * 2.0**WEIGHT_BITS).to(torch.int64)


def share_of(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """int64, the weight that kept tokens must reach."""
    return (total.double() * top_p.double()).to(torch.int64).clamp_min(1)


def _kept(
    x_RV: torch.Tensor,
    y_RV: torch.Tensor,
    w_RV: torch.Tensor,
    rules_R3: torch.Tensor,
    numbers_R3: torch.Tensor,
) -> torch.Tensor:
    """bool [R, V]."""
    _, top_p_R1, margin_R1 = rules_R3.split(1, dim=-1)
    top_k_R1 = numbers_R3[:, :1]
    order_RV = x_RV.argsort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    stays_RV = y_RV.gather(1, order_RV) >= margin_R1
    stays_RV &= (top_k_R1 <= 0) | (rank_V < top_k_R1)
    w_RV = torch.where(stays_RV, w_RV.gather(1, order_RV), 0)
    sums_RV = w_RV.cumsum(-1)
    share_R1 = share_of(sums_RV[:, -1:], top_p_R1)
    stays_RV &= (top_p_R1 >= 1.0) | (sums_RV - w_RV < share_R1)
    return torch.zeros_like(stays_RV).scatter_(1, order_RV, stays_RV)


def race(case: SampleCase, w_NV: torch.Tensor, numbers_N3: torch.Tensor) -> torch.Tensor:
    """int64 [N], the tokens that win, by their weights."""
    count, stretches, stretch = len(w_NV), case.stretches, case.stretch
    w_NGL = torch.nn.functional.pad(w_NV, (0, stretches * stretch - case.vocab))
    w_NGL = w_NGL.view(count, stretches, stretch)
    return heats(w_NGL, clocks(numbers_N3[:, 1], numbers_N3[:, 2], stretches + stretch))


def heats(w_NGL: torch.Tensor, times_NC: torch.Tensor) -> torch.Tensor:
    """The winners of both heats, int64 [N]."""
    count, stretches, stretch = w_NGL.shape
    winner_N = (w_NGL.sum(-1).to(torch.float32) / times_NC[:, :stretches]).argmax(-1)
    w_NL = w_NGL[torch.arange(count, device=w_NGL.device), winner_N].to(torch.float32)
    return winner_N * stretch + (w_NL / times_NC[:, stretches:]).argmax(-1)


def logprobs(
    case: SampleCase, logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norms_R1 = logits_RV.logsumexp(-1, keepdim=True)
    own_R = (logits_RV.gather(1, tokens_R[:, None]) - norms_R1)[:, 0]
    order_RV = logits_RV.argsort(dim=-1, descending=True, stable=True)
    top_tokens_RK = order_RV[:, :top].contiguous()
    return own_R, logits_RV.gather(1, top_tokens_RK) - norms_R1, top_tokens_RK


BACKENDS = (
    Backend("sample.adjust", REFERENCE, adjust),
    Backend("sample.draw", REFERENCE, draw),
    Backend("sample.logprobs", REFERENCE, logprobs),
)
