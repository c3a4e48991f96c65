"""Attention as a framework without a kernel for it composes it: gather, product, softmax, product.

Caches are plain numbers. Some rows are worked on at a time, so that what is gathered is bounded.
"""

from __future__ import annotations

import torch

from metainfer.kernels.registry import YES, Backend, Verdict, no
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.base import Target
from metainfer.ops.kernel_order import COMPOSED

CHUNK_BYTES = 2**29
"""Of gathered keys and fp32 scores at a time."""

# Keys, and for each row the rows of them that it sees, -1 for none.
Listed = tuple[torch.Tensor, torch.Tensor]


def eligible(case: AttentionCase, target: Target) -> Verdict:
    if (case.window_format, case.entry_format) != (DENSE, DENSE):
        return no("reads caches of plain numbers alone")
    if case.lse:
        return no("does not return the log-sum-exp")
    return YES


def sparse_prefill(
    case: AttentionCase,
    q_THK: torch.Tensor,
    positions_T: torch.Tensor,
    latents_ND: torch.Tensor | None,
    latent_rows_T: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_BE: torch.Tensor | None = None,
    sequence_T: torch.Tensor | None = None,
    selected_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    positions_T1 = positions_T.unsqueeze(1)
    lists: list[Listed] = []
    if latents_ND is not None and latent_rows_T is not None:
        back_W = torch.arange(case.window, device=q_THK.device)
        rows_TW = latent_rows_T.unsqueeze(1) - back_W
        lists.append((latents_ND, rows_TW.masked_fill(back_W > positions_T1, -1)))
    if entries is not None and entry_rows_BE is not None and entry_rows_BE.shape[1]:
        if selected_TK is None:
            entry_E = torch.arange(entry_rows_BE.shape[1], device=q_THK.device)
            selected_TK = torch.where(entry_E < (positions_T1 + 1) // case.ratio, entry_E, -1)
        sequence = 0 if sequence_T is None else sequence_T.unsqueeze(1)
        rows_TK = entry_rows_BE[sequence, selected_TK.clamp(min=0)]
        lists.append((entries, rows_TK.masked_fill(selected_TK < 0, -1)))
    return _attention(case, q_THK, lists, sink_H)


def sparse_decode(
    case: AttentionCase,
    q_THK: torch.Tensor,
    ring: torch.Tensor | None,
    window_rows_TW: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    lists: list[Listed] = []
    if ring is not None and window_rows_TW is not None:
        lists.append((ring, window_rows_TW))
    if entries is not None and entry_rows_TK is not None:
        lists.append((entries, entry_rows_TK))
    return _attention(case, q_THK, lists, sink_H)


def _attention(
    case: AttentionCase, q_THK: torch.Tensor, lists: list[Listed], sink_H: torch.Tensor | None
) -> torch.Tensor:
    lists = [(cache, rows_TN) for cache, rows_TN in lists if cache.numel() and rows_TN.shape[1]]
    keys = sum(rows_TN.shape[1] for _, rows_TN in lists)
    out_THD = q_THK.new_zeros(*q_THK.shape[:2], case.width)
    if not keys:
        return out_THD
    step = max(1, CHUNK_BYTES // (keys * (4 * case.key_width + 10 * case.heads)))
    for first in range(0, len(q_THK), step):
        rows = slice(first, first + step)
        parts = [(cache, rows_TN[rows]) for cache, rows_TN in lists]
        out_THD[rows] = _attend(case, q_THK[rows], parts, sink_H)
    return out_THD


def _attend(
    case: AttentionCase, q_THK: torch.Tensor, lists: list[Listed], sink_H: torch.Tensor | None
) -> torch.Tensor:
    """With the sink as one more column of scores."""
    keys_TNK = torch.cat([_gathered(*listed) for listed in lists], dim=1).to(q_THK.dtype)
    hidden_TN = torch.cat([rows_TN < 0 for _, rows_TN in lists], dim=1)
    scores_THN = (q_THK @ keys_TNK.transpose(1, 2)).float() * case.score_scale
    scores_THN = scores_THN.masked_fill(hidden_TN.unsqueeze(1), -torch.inf)
    if sink_H is not None:
        sink_TH1 = sink_H.float().expand(len(q_THK), -1).unsqueeze(-1)
        scores_THN = torch.cat([scores_THN, sink_TH1], dim=-1)
    weights_THN = scores_THN.softmax(-1)[..., : keys_TNK.shape[1]].to(q_THK.dtype)
    out_THD = weights_THN @ keys_TNK[..., : case.width]
    return out_THD.masked_fill(hidden_TN.all(1)[:, None, None], 0.0)


def _gathered(cache_NK: torch.Tensor, rows_TN: torch.Tensor) -> torch.Tensor:
    """[T, N, K]. Where nothing is listed a row that is listed stands in: others may hold NaN, which
    a weight of 0 would not cancel. 0 for rows that list nothing."""
    listed_T1 = rows_TN.amax(1, keepdim=True)
    rows_TN = torch.where(rows_TN < 0, listed_T1, rows_TN)
    keys_TNK = cache_NK[rows_TN.clamp(min=0)]
    return keys_TNK.masked_fill((listed_T1 < 0).unsqueeze(-1), 0.0)


BACKENDS = (
    Backend("attention.sparse_prefill", COMPOSED, sparse_prefill, eligible),
    Backend("attention.sparse_decode", COMPOSED, sparse_decode, eligible),
)
