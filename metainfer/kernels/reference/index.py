"""The lightning indexer, plainly, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from metainfer.kernels.reference.formats import decode_index
from metainfer.kernels.registry import Backend
from metainfer.ops.index import DENSE, IndexCase
from metainfer.ops.kernel_order import REFERENCE

Coded: TypeAlias = (
    torch.Tensor | tuple[torch.Tensor, torch.Tensor]
)  # plain numbers, or codes and scales
Chosen: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_TILE_ELEMENTS = 2**26


def index_topk(
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_BE: torch.Tensor,
    sequence_T: torch.Tensor | None,
    positions_T: torch.Tensor,
    candidates_TB: torch.Tensor | None,
) -> Chosen:
    entry_E = torch.arange(key_rows_BE.shape[1], device=positions_T.device)
    seen_T = (positions_T + 1) // case.ratio
    if sequence_T is None:
        sequence_T = torch.zeros_like(positions_T)

    def scores(tile: slice, q_THI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        products_THE = q_THI.new_zeros(*q_THI.shape[:2], len(entry_E))
        for sequence in sequence_T[tile].unique():
            mine_T = sequence_T[tile] == sequence
            keys_EI = _plain(case, keys, key_rows_BE[sequence].clamp(min=0))
            products_THE[mine_T] = torch.einsum("thi,ei->the", q_THI[mine_T], keys_EI)
        return products_THE, entry_E < seen_T[tile].unsqueeze(1)

    return _in_tiles(case, q, weights_TH, len(entry_E), candidates_TB, scores)


def index_topk_decode(
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_TE: torch.Tensor,
    candidates_TB: torch.Tensor | None,
) -> Chosen:
    def scores(tile: slice, q_THI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys_TEI = _plain(case, keys, key_rows_TE[tile].clamp(min=0))
        return torch.einsum("thi,tei->the", q_THI, keys_TEI), key_rows_TE[tile] >= 0

    chosen = _in_tiles(case, q, weights_TH, key_rows_TE.shape[1], candidates_TB, scores)
    if not case.gives_rows:
        return chosen
    if isinstance(chosen, torch.Tensor):
        return listed_rows(key_rows_TE, chosen)
    assert case.gives_scores, "blocks of candidates have no rows"
    ids_TK, scores_TK = chosen
    return listed_rows(key_rows_TE, ids_TK), scores_TK


def listed_rows(key_rows_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """What the lists have for entries with these numbers; -1 for -1."""
    if not key_rows_TE.shape[1]:
        return ids_TK
    return key_rows_TE.gather(1, ids_TK.clamp(min=0)).masked_fill_(ids_TK < 0, -1)


def scores_of(scores_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Those of the entries with these numbers; -inf for -1."""
    if not scores_TE.shape[1]:
        return torch.full_like(ids_TK, -torch.inf, dtype=scores_TE.dtype)
    return scores_TE.gather(1, ids_TK.clamp(min=0)).masked_fill_(ids_TK < 0, -torch.inf)


def _plain(case: IndexCase, coded: Coded, rows: torch.Tensor | slice) -> torch.Tensor:
    """The chosen rows of keys or queries in fp32."""
    if isinstance(coded, torch.Tensor):
        assert case.key_format == DENSE
        return coded[rows].float()
    codes, scales = coded
    return decode_index(case.key_format, codes[rows], scales[rows])


def _in_tiles(
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    entries: int,
    candidates_TB: torch.Tensor | None,
    scores: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Chosen:
    """The choice of all rows; `scores` gives products and what is seen of some of them."""
    rows, device = len(weights_TH), weights_TH.device
    ids_TK = torch.full((rows, case.topk), -1, device=device)
    blocks_TB = torch.full((rows, case.candidate_blocks), -1, device=device)
    scores_TK = torch.empty(rows, case.topk if case.gives_scores else 0, device=device)
    for tile in _tiles(rows, max(case.heads, case.width) * entries):
        products_THE, seen_TE = scores(tile, _plain(case, q, tile))
        scores_TE = _scores(case, products_THE, weights_TH[tile])
        if candidates_TB is not None:
            seen_TE = seen_TE & _named(case, candidates_TB[tile], entries)
        ids_TK[tile] = _best(scores_TE, seen_TE, case.topk)
        if case.publishes:
            blocks_TB[tile] = _best_blocks(case, scores_TE, seen_TE)
        if case.gives_scores:
            scores_TK[tile] = scores_of(scores_TE, ids_TK[tile])
    if case.gives_scores:
        return ids_TK, scores_TK
    return (ids_TK, blocks_TB) if case.publishes else ids_TK


def _tiles(rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, _TILE_ELEMENTS // max(1, row_elements))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _scores(case: IndexCase, products_THE: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """fp32, never below the least finite number, NaN included."""
    scale = (case.width * case.heads) ** -0.5
    scores_TE = torch.einsum("th,the->te", weights_TH.float() * scale, products_THE.relu())
    worst = torch.finfo(torch.float32).min
    return scores_TE.nan_to_num(nan=worst, posinf=torch.inf, neginf=worst)


def _named(case: IndexCase, candidates_TB: torch.Tensor, entries: int) -> torch.Tensor:
    """bool [T, E]: whether an entry lies in a candidate block."""
    blocks = -(-entries // case.candidate_block)
    named_TN = candidates_TB.new_zeros(len(candidates_TB), blocks + 1, dtype=torch.bool)
    named_TN.scatter_(1, torch.where(candidates_TB < 0, blocks, candidates_TB), True)
    return named_TN[:, :-1].repeat_interleave(case.candidate_block, dim=1)[:, :entries]


def _best(scores_TE: torch.Tensor, seen_TE: torch.Tensor, most: int) -> torch.Tensor:
    """Numbers of the `most` best that are seen, in ascending order, then -1."""
    scores_TE = scores_TE.masked_fill(~seen_TE, -torch.inf)
    # A stable sort keeps the lower number first among equals.
    ids_TK = scores_TE.argsort(dim=-1, descending=True, stable=True)[:, :most]
    none = seen_TE.shape[1]
    ids_TK = torch.where(seen_TE.gather(1, ids_TK), ids_TK, none).sort(-1).values
    ids_TK = ids_TK.masked_fill(ids_TK == none, -1)
    return torch.nn.functional.pad(ids_TK, (0, most - ids_TK.shape[1]), value=-1)


def _best_blocks(case: IndexCase, scores_TE: torch.Tensor, seen_TE: torch.Tensor) -> torch.Tensor:
    size = case.candidate_block
    missing = -seen_TE.shape[1] % size
    scores_TE = scores_TE.masked_fill(~seen_TE, -torch.inf)
    padded_TE = torch.nn.functional.pad(scores_TE, (0, missing), value=-torch.inf)
    best_TN = padded_TE.unflatten(1, (-1, size)).amax(-1)
    seen_TN = best_TN > -torch.inf
    newest_T1 = seen_TN.sum(1, keepdim=True) - 1
    is_newest_TN = torch.arange(seen_TN.shape[1], device=seen_TN.device) == newest_T1
    return _best(best_TN.masked_fill(is_newest_TN, torch.inf), seen_TN, case.candidate_blocks)


BACKENDS = (
    Backend("attention.index_topk", REFERENCE, index_topk),
    Backend("attention.index_topk_decode", REFERENCE, index_topk_decode),
)
