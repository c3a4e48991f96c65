"""The lightning indexer: scores in tiles of rows, the choice by the K-th score without a sort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from metainfer.kernels.cpu.backend import cpu_backend, on_cpu
from metainfer.kernels.cpu.coded import key_numbers
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.index import listed_rows, scores_of
from metainfer.kernels.registry import Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.index import DENSE, IndexCase

Coded: TypeAlias = (
    torch.Tensor | tuple[torch.Tensor, torch.Tensor]
)  # plain numbers, or codes and scales

# Products (rows x heads x entries) that are held at a time.
_TILE_PRODUCTS = 2**20


def index_topk(
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_BE: torch.Tensor,
    sequence_T: torch.Tensor | None,
    positions_T: torch.Tensor,
    candidates_TB: torch.Tensor | None,
) -> torch.Tensor:
    q_THI = _numbers(case, q)
    ids_TK = torch.empty(len(q_THI), case.topk, dtype=torch.int64)
    seen_T = ((positions_T + 1) // case.ratio).clamp_(max=key_rows_BE.shape[1])
    for sequence, rows in _runs(sequence_T, len(q_THI)):
        listed = key_rows_BE[sequence] if sequence_T is None else _listed(key_rows_BE[sequence])
        keys_EI = _numbers(case, keys, listed)
        _choose_run(case, q_THI[rows], weights_TH[rows], keys_EI, seen_T[rows], ids_TK[rows])
    return ids_TK


def _runs(sequence_T: torch.Tensor | None, rows: int) -> Iterator[tuple[int, slice]]:
    """Rows of one sequence that lie together."""
    if sequence_T is None:
        if rows:
            yield 0, slice(0, rows)
        return
    sequences, counts = sequence_T.unique_consecutive(return_counts=True)
    stop = 0
    for sequence, count in zip(sequences.tolist(), counts.tolist(), strict=True):
        start, stop = stop, stop + count
        yield sequence, slice(start, stop)


def _listed(key_rows_E: torch.Tensor) -> torch.Tensor:
    return key_rows_E[: int((key_rows_E >= 0).sum())]


def _choose_run(
    case: IndexCase,
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_EI: torch.Tensor,
    seen_T: torch.Tensor,
    ids_TK: torch.Tensor,
) -> None:
    """Writes the choice of rows that share the keys of their entries."""
    for tile in row_tiles(len(q_THI), case.heads * len(keys_EI), _TILE_PRODUCTS):
        seen_t = seen_T[tile]
        most = int(seen_t.max())
        if most <= case.topk:
            ids_TK[tile] = _first(case, seen_t)
            continue
        q_tHI = q_THI[tile]
        products_tHE = (q_tHI.flatten(0, 1) @ keys_EI[:most].T).unflatten(0, (-1, case.heads))
        scores_tE = _scores(case, products_tHE, weights_TH[tile])
        ids_TK[tile] = _choose(case, scores_tE, seen_t)


def index_topk_decode(
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_TE: torch.Tensor,
    candidates_TB: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    scores_TK = torch.empty(len(key_rows_TE), case.topk) if case.gives_scores else None
    ids_TK = _chosen_of_lists(case, q, weights_TH, keys, key_rows_TE, scores_TK)
    chosen_TK = listed_rows(key_rows_TE, ids_TK) if case.gives_rows else ids_TK
    return chosen_TK if scores_TK is None else (chosen_TK, scores_TK)


def _chosen_of_lists(
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_TE: torch.Tensor,
    scores_TK: torch.Tensor | None,
) -> torch.Tensor:
    """Numbers of the entries; their scores go to `scores_TK`."""
    rows, entries = key_rows_TE.shape
    seen_T = (key_rows_TE >= 0).sum(1)
    if scores_TK is not None and not entries:
        scores_TK.fill_(-torch.inf)
    if entries <= case.topk and (scores_TK is None or not entries):
        return _first(case, seen_T)
    q_THI = _numbers(case, q)
    ids_TK = torch.empty(rows, case.topk, dtype=torch.int64)
    for tile in row_tiles(rows, case.heads * entries, _TILE_PRODUCTS):
        # A row of the cache that nobody listed may stand in where the list has ended: what it
        # gives is not looked at.
        listed = _numbers(case, keys, key_rows_TE[tile].flatten().clamp(min=0))
        keys_tEI = listed.view(-1, entries, case.width)
        products_tHE = torch.bmm(q_THI[tile], keys_tEI.transpose(1, 2))
        scores_tE = _scores(case, products_tHE, weights_TH[tile])
        ids_TK[tile] = _choose(case, scores_tE, seen_T[tile])
        if scores_TK is not None:
            scores_TK[tile] = scores_of(scores_tE, ids_TK[tile])
    return ids_TK


def _numbers(case: IndexCase, coded: Coded, rows_N: torch.Tensor | None = None) -> torch.Tensor:
    """Keys or queries, all or some rows, as they are multiplied: coded ones are in fp32."""
    parts = coded if isinstance(coded, tuple) else (coded,)
    if rows_N is not None:
        parts = tuple(part.index_select(0, rows_N) for part in parts)
    if case.key_format == DENSE:
        return parts[0].to(TORCH_DTYPES[case.dtype])
    return key_numbers(case.key_format, *parts)


def _first(case: IndexCase, seen_T: torch.Tensor) -> torch.Tensor:
    """The choice where no row sees more than K entries: all of them."""
    number_K = torch.arange(case.topk)
    return torch.where(number_K < seen_T.unsqueeze(1), number_K, -1)


def _scores(case: IndexCase, products_THE: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """fp32, never below the least finite number, NaN included."""
    scale = (case.width * case.heads) ** -0.5
    weights_T1H = (weights_TH * scale).unsqueeze(1)
    scores_TE = torch.bmm(weights_T1H, products_THE.float().relu_()).squeeze(1)
    worst = torch.finfo(torch.float32).min
    return scores_TE.nan_to_num_(nan=worst, neginf=worst)


def _choose(case: IndexCase, scores_TE: torch.Tensor, seen_T: torch.Tensor) -> torch.Tensor:
    """The K best of the first `seen` entries of each row; scores of the others are lost."""
    if scores_TE.shape[1] <= case.topk:
        return _first(case, seen_T)
    unseen_TE = torch.arange(scores_TE.shape[1]) >= seen_T.unsqueeze(1)
    scores_TE.masked_fill_(unseen_TE, -torch.inf)
    last_T1 = scores_TE.topk(case.topk, sorted=False).values.amin(1, keepdim=True)
    chosen_TE = (scores_TE >= last_T1).logical_and_(~unseen_TE)
    count_T = chosen_TE.sum(1)
    if bool((count_T > case.topk).any()):
        _drop_late_equals(case, chosen_TE, scores_TE, last_T1)
        count_T = chosen_TE.sum(1)
    ids_N = chosen_TE.nonzero()[:, 1]
    if len(ids_N) == len(chosen_TE) * case.topk:
        return ids_N.view(-1, case.topk)
    ids_TK = torch.full((len(chosen_TE), case.topk), -1)
    return ids_TK.masked_scatter_(torch.arange(case.topk) < count_T.unsqueeze(1), ids_N)


def _drop_late_equals(
    case: IndexCase, chosen_TE: torch.Tensor, scores_TE: torch.Tensor, last_T1: torch.Tensor
) -> None:
    """Of the chosen entries with the last score, keeps as many as there is room for, lower numbers
    first."""
    equal_TE = (scores_TE == last_T1).logical_and_(chosen_TE)
    room_T1 = case.topk - (scores_TE > last_T1).sum(1, keepdim=True)
    chosen_TE.logical_and_(~equal_TE | (equal_TE.cumsum(1) <= room_T1))


def _without_candidates(case: IndexCase, target: Target) -> Verdict:
    if case.candidate_blocks:
        return no(f"knows no blocks of candidates, and the case has {case.candidate_blocks}")
    return on_cpu(case, target)


BACKENDS = (
    cpu_backend("attention.index_topk", index_topk, eligible=_without_candidates),
    cpu_backend("attention.index_topk_decode", index_topk_decode, eligible=_without_candidates),
)
