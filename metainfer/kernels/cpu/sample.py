"""The draw and log-probabilities on the CPU: only rows and tokens that matter are looked at.

Shape suffixes: R rows, N random rows, V tokens, K candidates.
"""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.reference.sample import race, row_errors, scaled, share_of, weights
from metainfer.ops.sample import SampleCase

_FIRST_CANDIDATES = 64
"""top_p looks at so many of the likeliest tokens first; they hold its share in most rows."""


def draw(
    case: SampleCase,
    logits_RV: torch.Tensor,
    adjusted_RV: torch.Tensor | None,
    rules_R3: torch.Tensor | None,
    numbers_R3: torch.Tensor | None,
    filters: bool,
) -> torch.Tensor:
    x_RV = logits_RV if adjusted_RV is None else adjusted_RV
    tokens_R = x_RV.argmax(-1)  # the first of equal ones
    if rules_R3 is not None and numbers_R3 is not None:
        random_N = rules_R3[:, 0].nonzero()[:, 0]
        if len(random_N) == len(x_RV):
            tokens_R = _draw(case, x_RV, rules_R3, numbers_R3, filters)
        elif len(random_N):
            rules_N3, numbers_N3 = rules_R3[random_N], numbers_R3[random_N]
            tokens_R[random_N] = _draw(case, x_RV[random_N], rules_N3, numbers_N3, filters)
    errors_R = torch.zeros_like(tokens_R)
    # Where nothing is odd the sum is finite, and cheaper than a look at each number.
    sums_R = logits_RV.sum(-1)
    if adjusted_RV is not None:
        sums_R = sums_R + adjusted_RV.amax(-1)
    odd_N = (~sums_R.isfinite()).nonzero()[:, 0]
    if len(odd_N):
        errors_R[odd_N] = row_errors(logits_RV[odd_N], x_RV[odd_N])
        tokens_R.masked_fill_(errors_R > 0, 0)
    return torch.stack([tokens_R, errors_R])


def _draw(
    case: SampleCase,
    x_NV: torch.Tensor,
    rules_N3: torch.Tensor,
    numbers_N3: torch.Tensor,
    filters: bool,
) -> torch.Tensor:
    y_NV = scaled(x_NV, rules_N3)
    if not filters:
        return race(case, weights(y_NV), numbers_N3)
    margin_N1 = rules_N3[:, 2:]
    stays_NV = y_NV >= margin_N1
    w_NV = weights(y_NV).masked_fill_(~stays_NV, 0)
    limits_N = stays_NV.sum(-1)
    top_k_N = numbers_N3[:, 0]
    limits_N = torch.where(top_k_N > 0, top_k_N.minimum(limits_N), limits_N)
    busy_N = ((top_k_N > 0) & (top_k_N < case.vocab) | (rules_N3[:, 1] < 1.0)).nonzero()[:, 0]
    if len(busy_N):
        chosen = (x_NV[busy_N], w_NV[busy_N], limits_N[busy_N, None], rules_N3[busy_N, 1:2])
        most = int(torch.where(top_k_N < case.vocab, top_k_N, 0).max())
        w_NV[busy_N] = _keep_likeliest(*chosen, most)
    return race(case, w_NV, numbers_N3)


def _keep_likeliest(
    x_NV: torch.Tensor,
    w_NV: torch.Tensor,
    limits_N1: torch.Tensor,
    top_p_N1: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """The weights with zeros outside of what each row keeps: its `limits` tokens of greatest x, and
    of these the fewest that reach the share; `most` is the largest top_k below V."""
    cutoff_N1, count_N1 = _cutoff(x_NV, w_NV, limits_N1, top_p_N1, most)
    kept_NV = x_NV >= cutoff_N1
    if bool((kept_NV.sum(-1, keepdim=True) > count_N1).any()):
        # Where several tokens sit exactly at the cutoff, the lowest of them are kept.
        ties_NV = x_NV == cutoff_N1
        room_N1 = count_N1 - (x_NV > cutoff_N1).sum(-1, keepdim=True)
        kept_NV &= ~(ties_NV & (ties_NV.cumsum(-1) > room_N1))
    return w_NV.masked_fill(~kept_NV, 0)


def _cutoff(
    x_NV: torch.Tensor,
    w_NV: torch.Tensor,
    limits_N1: torch.Tensor,
    top_p_N1: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(smallest x that is kept, number of tokens kept) of each row."""
    vocab = x_NV.shape[1]
    by_share_N1 = top_p_N1 < 1.0
    candidates = min(vocab, max(_FIRST_CANDIDATES, most))
    while True:
        x_NK, ids_NK = x_NV.topk(candidates, dim=-1)
        beyond_NK = torch.arange(candidates, device=x_NV.device) >= limits_N1
        sums_NK = w_NV.gather(1, ids_NK).masked_fill_(beyond_NK, 0).cumsum(-1)
        are_all_N1 = limits_N1 <= candidates
        total_N1 = torch.where(are_all_N1, sums_NK[:, -1:], w_NV.sum(-1, keepdim=True))
        below_N1 = (sums_NK < share_of(total_N1, top_p_N1)).sum(-1, keepdim=True)
        short_N1 = by_share_N1 & ~are_all_N1 & (below_N1 == candidates)
        if candidates == vocab or not bool(short_N1.any()):
            break
        candidates = min(vocab, candidates * 8)
    count_N1 = torch.where(by_share_N1, below_N1 + 1, vocab).minimum(limits_N1)
    cutoff_N1 = x_NK.gather(1, (count_N1 - 1).clamp(0, candidates - 1))
    # More tokens than candidates: nothing was asked of such a row but what its weights say.
    return torch.where(count_N1 <= candidates, cutoff_N1, -torch.inf), count_N1


def logprobs(
    case: SampleCase, logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norms_R1 = logits_RV.logsumexp(-1, keepdim=True)
    own_R = (logits_RV.gather(1, tokens_R[:, None]) - norms_R1)[:, 0]
    x_RK, ids_RK = logits_RV.topk(min(top + 1, case.vocab), dim=-1)
    odd_R = (x_RK[:, 1:] == x_RK[:, :-1]).any(-1)
    x_RK, ids_RK = x_RK[:, :top].clone(), ids_RK[:, :top].clone()
    if bool(odd_R.any()):  # topk says nothing of the order of equal ones
        order_NV = logits_RV[odd_R].argsort(dim=-1, descending=True, stable=True)
        ids_RK[odd_R] = order_NV[:, :top]
    return own_R, x_RK - norms_R1, ids_RK


BACKENDS = (cpu_backend("sample.draw", draw), cpu_backend("sample.logprobs", logprobs))
