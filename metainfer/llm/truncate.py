"""top_k and top_p: keep the likeliest tokens of each row.

Shape suffixes: N rows, V tokens of the vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_FIRST_CANDIDATES = 64
"""top_p looks at so many of the likeliest tokens first; they hold its share in most rows."""


def keep_likeliest(
    p_NV: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """`p_NV` with zeros outside of what each row keeps: its `top_k[n]` likeliest tokens (0 or -1:
    all), and of these the fewest whose sum reaches the share `top_p[n]` (1: all). Among equal
    probabilities lower ids are kept. Rows need not sum to 1, before or after."""
    vocab = p_NV.shape[1]
    limits = [k if 0 < k < vocab else vocab for k in top_k]
    busy = [n for n in range(len(limits)) if limits[n] < vocab or top_p[n] < 1.0]
    if not busy:
        return p_NV
    if len(busy) < len(limits):
        index = torch.tensor(busy, device=p_NV.device)
        rest = keep_likeliest(p_NV[index], [top_k[n] for n in busy], [top_p[n] for n in busy])
        return p_NV.index_copy(0, index, rest)
    limits_N1 = torch.tensor(limits, device=p_NV.device)[:, None]
    shares_N1 = torch.tensor(top_p, device=p_NV.device)[:, None]
    most = max((k for k in limits if k < vocab), default=0)
    cutoff_N1, count_N1 = _cutoff(p_NV, limits_N1, shares_N1, most)
    kept_NV = p_NV.masked_fill(p_NV < cutoff_N1, 0.0)
    if bool(((kept_NV > 0).sum(-1, keepdim=True) > count_N1).any()):
        _drop_ties(kept_NV, cutoff_N1, count_N1)
    return kept_NV


def _cutoff(
    p_NV: torch.Tensor, limits_N1: torch.Tensor, shares_N1: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(smallest probability kept, number of tokens kept) of each row; `most` is the largest limit
    below V."""
    vocab = p_NV.shape[1]
    by_share = bool((shares_N1 < 1.0).any())
    candidates = min(vocab, max(_FIRST_CANDIDATES, most))
    while True:
        p_NK = p_NV.topk(candidates, dim=-1).values
        ranks_K = torch.arange(candidates, device=p_NV.device)
        sums_NK = p_NK.masked_fill(ranks_K >= limits_N1, 0.0).cumsum(-1)
        total_N1 = torch.where(limits_N1 <= candidates, sums_NK[:, -1:], p_NV.sum(-1, keepdim=True))
        below_N1 = (sums_NK < shares_N1 * total_N1).sum(-1, keepdim=True)
        beyond_N1 = (below_N1 == candidates) & (shares_N1 < 1.0) & (limits_N1 > candidates)
        if candidates == vocab or not by_share or not bool(beyond_N1.any()):
            break
        candidates = min(vocab, candidates * 8)
    count_N1 = torch.where(shares_N1 < 1.0, below_N1 + 1, vocab).minimum(limits_N1)
    cutoff_N1 = p_NK.gather(1, (count_N1 - 1).clamp_max(candidates - 1))
    return torch.where(count_N1 < vocab, cutoff_N1, 0.0), count_N1


def _drop_ties(kept_NV: torch.Tensor, cutoff_N1: torch.Tensor, count_N1: torch.Tensor) -> None:
    """Where several tokens sit exactly at the cutoff, keep the lowest ids of them."""
    ties_NV = kept_NV == cutoff_N1
    room_N1 = count_N1 - (kept_NV > cutoff_N1).sum(-1, keepdim=True)
    kept_NV.masked_fill_(ties_NV & (ties_NV.cumsum(-1) > room_N1), 0.0)
