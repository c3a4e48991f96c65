"""The lightning indexer composed: all products, weighted sums of them, torch's top-k."""

from __future__ import annotations

from typing import TypeAlias

import torch

from metainfer.kernels.composed.attention import CHUNK_BYTES
from metainfer.kernels.reference.index import listed_rows, scores_of
from metainfer.kernels.registry import YES, Backend, Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.index import DENSE, IndexCase
from metainfer.ops.kernel_order import COMPOSED

Chosen: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def eligible(case: IndexCase, target: Target) -> Verdict:
    if case.key_format != DENSE:
        return no("takes keys and queries that are plain numbers alone")
    if case.candidate_blocks:
        return no("knows no candidates")
    return YES


def index_topk(
    case: IndexCase,
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_MI: torch.Tensor,
    key_rows_BE: torch.Tensor,
    sequence_T: torch.Tensor | None,
    positions_T: torch.Tensor,
    candidates_TB: torch.Tensor | None,
) -> torch.Tensor:
    ids_TK = q_THI.new_full((len(q_THI), case.topk), -1, dtype=torch.int64)
    entry_E = torch.arange(key_rows_BE.shape[1], device=q_THI.device)
    step = _rows_at_once(case, len(entry_E))
    for number, key_rows_E in enumerate(key_rows_BE):
        own_T = torch.arange(len(q_THI), device=q_THI.device)
        if sequence_T is not None:
            own_T = (sequence_T == number).nonzero().flatten()
        elif number:
            break
        keys_EI = keys_MI[key_rows_E.clamp(min=0)].to(q_THI.dtype)
        for rows in own_T.split(step):
            products_THE = torch.einsum("thi,ei->the", q_THI[rows], keys_EI)
            seen_TE = entry_E < (positions_T[rows, None] + 1) // case.ratio
            ids_TK[rows] = _best(case, _scores(case, products_THE, weights_TH[rows]), seen_TE)
    return ids_TK


def index_topk_decode(
    case: IndexCase,
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_MI: torch.Tensor,
    key_rows_TE: torch.Tensor,
    candidates_TB: torch.Tensor | None,
) -> Chosen:
    ids_TK = q_THI.new_full((len(q_THI), case.topk), -1, dtype=torch.int64)
    scores_TK = q_THI.new_empty(ids_TK.shape, dtype=torch.float32)
    step = _rows_at_once(case, key_rows_TE.shape[1])
    for first in range(0, len(q_THI), step):
        rows = slice(first, first + step)
        keys_TEI = keys_MI[key_rows_TE[rows].clamp(min=0)].to(q_THI.dtype)
        products_THE = q_THI[rows] @ keys_TEI.transpose(1, 2)
        scores_TE = _scores(case, products_THE, weights_TH[rows])
        ids_TK[rows] = _best(case, scores_TE, key_rows_TE[rows] >= 0)
        if case.gives_scores:
            scores_TK[rows] = scores_of(scores_TE, ids_TK[rows])
    chosen_TK = listed_rows(key_rows_TE, ids_TK) if case.gives_rows else ids_TK
    return (chosen_TK, scores_TK) if case.gives_scores else chosen_TK


def _rows_at_once(case: IndexCase, entries: int) -> int:
    return max(1, CHUNK_BYTES // max(1, (8 * case.heads + 2 * case.width + 40) * entries))


def _scores(case: IndexCase, products_THE: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """fp32, never below the least finite number, NaN included."""
    factor = (case.width * case.heads) ** -0.5
    scores_T1E = (weights_TH.float() * factor).unsqueeze(1) @ products_THE.float().relu()
    return scores_T1E.squeeze(1).nan_to_num(nan=torch.finfo(torch.float32).min, posinf=torch.inf)


def _best(case: IndexCase, scores_TE: torch.Tensor, seen_TE: torch.Tensor) -> torch.Tensor:
    """Numbers of the best entries that are seen, in ascending order, then -1."""
    entries = seen_TE.shape[1]
    ranks_TE = _ranks(scores_TE).masked_fill(~seen_TE, -1)
    best = ranks_TE.topk(min(case.topk, entries), dim=-1)
    ids_TK = torch.where(best.values < 0, entries, best.indices).sort(-1).values
    ids_TK = ids_TK.masked_fill(ids_TK == entries, -1)
    return torch.nn.functional.pad(ids_TK, (0, case.topk - ids_TK.shape[1]), value=-1)


def _ranks(scores_TE: torch.Tensor) -> torch.Tensor:
    """int64 that are ordered as the scores are, and among equal ones the first is the largest:
    torch's top-k leaves the order of equal numbers open."""
    bits_TE = (scores_TE + 0.0).view(torch.int32)
    ordered_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE).long() + 2**31
    backwards_E = torch.arange(scores_TE.shape[1] - 1, -1, -1, device=scores_TE.device)
    return ordered_TE * 2**31 + backwards_E


BACKENDS = (
    Backend("attention.index_topk", COMPOSED, index_topk, eligible),
    Backend("attention.index_topk_decode", COMPOSED, index_topk_decode, eligible),
)
