"""The draw and log-probabilities on the CPU: only rows and tokens that matter are looked at.

Shape suffixes: R rows, N random rows, V tokens, K candidates.
"""

from __future__ import annotations

import numpy as np
import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.reference.clocks import times_of, words_of
from metainfer.kernels.reference.sample import heats, row_errors, share_of
from metainfer.ops.sample import WEIGHT_BITS, SampleCase

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
    if rules_R3 is None or numbers_R3 is None:
        tokens_R = x_RV.argmax(-1)  # the first of equal ones
    elif bool((rules_R3[:, 0] > 0).all()):
        tokens_R = _draw(case, x_RV, rules_R3, numbers_R3, filters)
    else:
        tokens_R = x_RV.argmax(-1)
        random_N = rules_R3[:, 0].nonzero()[:, 0]
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
    """Tokens, int64 [N]; any of rows without finite logits."""
    count, stretches, stretch = len(x_NV), case.stretches, case.stretch
    y_NV = (x_NV - x_NV.amax(-1, keepdim=True)).mul_(rules_N3[:, :1])
    margin_N1 = rules_N3[:, 2:]
    if filters and bool((margin_N1 > -torch.inf).any()):
        y_NV.masked_fill_(y_NV < margin_N1, -torch.inf)
    w_NC = torch.empty(count, stretches * stretch, dtype=torch.int64)
    w_NV = w_NC[:, : case.vocab].copy_(y_NV.exp_().mul_(2.0**WEIGHT_BITS))
    w_NC[:, case.vocab :] = 0
    if filters:
        _keep_likeliest(x_NV, w_NV, numbers_N3[:, 0], rules_N3[:, 1])
    times_NC = _clocks(numbers_N3[:, 1:], stretches + stretch)
    return heats(w_NC.view(count, stretches, stretch), times_NC)


def _clocks(keys_N2: torch.Tensor, count: int) -> torch.Tensor:
    """As `reference.clocks.clocks`, by numpy, which takes less time to start what is small."""
    keys = keys_N2.numpy()
    words = words_of(np.arange(-(-count // 4)), keys[:, :1], keys[:, 1:])
    return times_of(torch.from_numpy(np.stack(words, axis=-1)).flatten(1)[:, :count])


def _keep_likeliest(
    x_NV: torch.Tensor, w_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor
) -> None:
    """Clears the weights of what rows do not keep: all but the `top_k` tokens of greatest x (0:
    all), and of these all but the fewest that reach the share."""
    vocab = x_NV.shape[1]
    has_limit_N = (top_k_N > 0) & (top_k_N < vocab)
    busy_N = (has_limit_N | (top_p_N < 1.0)).nonzero()[:, 0]
    if not len(busy_N):
        return
    most = int(torch.where(has_limit_N, top_k_N, 0).max())
    limits_N1 = torch.where(has_limit_N, top_k_N, vocab)[busy_N, None]
    are_all = len(busy_N) == len(x_NV)
    chosen = (x_NV, w_NV) if are_all else (x_NV[busy_N], w_NV[busy_N])
    cutoff_N1, room_N1 = _cutoff(*chosen, limits_N1, top_p_N[busy_N, None], most)
    drops_NV = chosen[0] < cutoff_N1
    if bool((room_N1 >= 0).any()):
        # Where several tokens sit exactly at the cutoff, the lowest of them are kept.
        ties_NV = (chosen[0] == cutoff_N1) & (room_N1 >= 0)
        drops_NV |= ties_NV & (ties_NV.cumsum(-1) > room_N1)
    chosen[1].masked_fill_(drops_NV, 0)
    if not are_all:
        w_NV[busy_N] = chosen[1]


def _cutoff(
    x_NV: torch.Tensor,
    w_NV: torch.Tensor,
    limits_N1: torch.Tensor,
    top_p_N1: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(smallest x that is kept, how many tokens at it are kept, or -1 for all) of each row; `most`
    is the largest limit below V."""
    vocab = x_NV.shape[1]
    by_share_N1 = top_p_N1 < 1.0
    candidates = min(vocab, max(_FIRST_CANDIDATES, most + 1))
    while True:
        x_NK, ids_NK = x_NV.topk(candidates, dim=-1)
        beyond_NK = torch.arange(candidates) >= limits_N1
        sums_NK = w_NV.gather(1, ids_NK).masked_fill_(beyond_NK, 0).cumsum(-1)
        are_all_N1 = limits_N1 <= candidates
        total_N1 = sums_NK[:, -1:]
        if not bool(are_all_N1.all()):
            total_N1 = torch.where(are_all_N1, total_N1, w_NV.sum(-1, keepdim=True))
        below_N1 = (sums_NK < share_of(total_N1, top_p_N1)).sum(-1, keepdim=True)
        # One more than are kept is to be seen, for ties.
        short_N1 = by_share_N1 & ~are_all_N1 & (below_N1 >= candidates - 1)
        if candidates == vocab or not bool(short_N1.any()):
            break
        candidates = min(vocab, candidates * 8)
    count_N1 = torch.where(by_share_N1, below_N1 + 1, vocab).minimum(limits_N1)
    cutoff_N1 = x_NK.gather(1, (count_N1 - 1).clamp_max(candidates - 1))
    next_N1 = x_NK.gather(1, count_N1.clamp_max(candidates - 1))
    above_N1 = (x_NK > cutoff_N1).sum(-1, keepdim=True)
    room_N1 = torch.where((count_N1 < vocab) & (next_N1 == cutoff_N1), count_N1 - above_N1, -1)
    return torch.where(count_N1 < vocab, cutoff_N1, -torch.inf), room_N1


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
