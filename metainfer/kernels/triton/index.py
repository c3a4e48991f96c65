"""attention.index_topk and attention.index_topk_decode in Triton.

Rows are scored some at a time, so that scores and what the choice needs beside them take no more
than `SCORE_BYTES` however many entries there are. No size depends on what tensors hold.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from metainfer.kernels.reference.index import listed_rows
from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.index_scores import (
    Coded,
    Rows,
    Tile,
    in_order,
    listed,
    pieces_in_order,
    score,
)
from metainfer.kernels.triton.index_seen import (
    best_in_blocks,
    see_candidates,
    see_lists,
    see_positions,
    take_all,
)
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.kernels.triton.topk import LARGEST_K, best, padded_width, row_bytes
from metainfer.ops.base import Target
from metainfer.ops.index import IndexCase

Chosen: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

SCORE_BYTES = 256 * 2**20
"""Memory for scores and for the choice among them."""

# Parts of the rows begin at multiples, so that their first elements are as aligned as all.
_ALIGNED_ROWS = 16
_SMALLEST_WIDTH, _LARGEST_WIDTH, _MOST_HEADS = 16, 128, 256


def eligible(case: IndexCase, target: Target) -> Verdict:
    is_power = case.width & (case.width - 1) == 0
    if not is_power or not _SMALLEST_WIDTH <= case.width <= _LARGEST_WIDTH:
        return no(f"takes keys of 16, 32, 64 or 128 channels, not {case.width}")
    if case.heads > _MOST_HEADS:
        return no(f"takes at most {_MOST_HEADS} heads, not {case.heads}")
    reason = _refused_candidates(case) if case.candidate_blocks else ""
    if reason:
        return no(reason)
    for name, number in (("entries", case.topk), ("blocks", case.candidate_blocks)):
        if number > LARGEST_K:
            return no(f"chooses at most {LARGEST_K} {name}, not {number}")
    return on_gpu(case, target)


def _refused_candidates(case: IndexCase) -> str:
    """Why blocks of candidates are not taken so; "" where they are."""
    if case.candidate_block & (case.candidate_block - 1):
        return f"takes blocks of a power of two of entries, not of {case.candidate_block}"
    if case.gives_rows:
        return "gives rows of lists alone, not of candidate blocks"
    return "gives scores of lists alone, not of candidate blocks" if case.gives_scores else ""


def index_topk(
    launch: Launcher,
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_BE: torch.Tensor,
    sequence_T: torch.Tensor | None,
    positions_T: torch.Tensor,
    candidates_TB: torch.Tensor | None,
    tile: Tile | None = None,
) -> Chosen:
    rows, entries = len(weights_TH), key_rows_BE.shape[1]
    seen_T = positions_T.new_empty(rows, dtype=torch.int32)
    launch(
        see_positions,
        (cdiv(rows, 256),),
        positions_T,
        seen_T,
        rows,
        entries,
        RATIO=case.ratio,
        BLOCK=256,
    )
    rows_of = (q, weights_TH, sequence_T, seen_T, candidates_TB)
    return _choose(launch, case, rows_of, keys, key_rows_BE, False, tile)


def index_topk_decode(
    launch: Launcher,
    case: IndexCase,
    q: Coded,
    weights_TH: torch.Tensor,
    keys: Coded,
    key_rows_TE: torch.Tensor,
    candidates_TB: torch.Tensor | None,
    tile: Tile | None = None,
) -> Chosen:
    rows, entries = key_rows_TE.shape
    seen_T = key_rows_TE.new_empty(rows, dtype=torch.int32)
    launch(see_lists, (rows,), key_rows_TE, seen_T, entries, key_rows_TE.stride(0), POINTS=1024)
    rows_of = (q, weights_TH, None, seen_T, candidates_TB)
    return _choose(launch, case, rows_of, keys, key_rows_TE, True, tile)


def rows_at_a_time(case: IndexCase, limit: int) -> int:
    """Rows whose scores of `limit` entries, with all that the choice needs, fit in SCORE_BYTES."""
    nbytes = row_bytes(limit, case.topk)
    if case.publishes:
        nbytes += row_bytes(cdiv(limit, case.candidate_block), case.candidate_blocks)
    rows = max(1, SCORE_BYTES // nbytes)
    return rows if rows < _ALIGNED_ROWS else rows // _ALIGNED_ROWS * _ALIGNED_ROWS


def _choose(
    launch: Launcher,
    case: IndexCase,
    rows_of: tuple[Any, ...],
    keys: Coded,
    key_rows: torch.Tensor,
    own_lists: bool,
    tile: Tile | None,
) -> Chosen:
    """
    Args:
        rows_of: queries, head weights, lists, seen entries and candidates of all rows.
        own_lists: each row has a list of its own.
    """
    *_, seen_T, candidates_TB = rows_of
    rows, limit = len(seen_T), key_rows.shape[1]
    ids_TK = seen_T.new_empty(rows, case.topk, dtype=torch.int64)
    blocks_TB = seen_T.new_empty(rows, case.candidate_blocks, dtype=torch.int64)
    scores_TK = None
    if case.gives_scores:
        scores_TK = seen_T.new_full(ids_TK.shape, -torch.inf, dtype=torch.float32)
    skipped = _skipped(case)
    pieces = []
    if candidates_TB is not None:
        limit = _see_candidates(launch, case, candidates_TB, seen_T)
    elif not own_lists:
        pieces = pieces_in_order(launch, case, rows, key_rows.shape)
    if limit <= skipped:
        names = _names(case, key_rows if own_lists else None, candidates_TB)
        _take_all(launch, seen_T, names[0], ids_TK, names[1])
        if case.publishes:
            _take_all(launch, seen_T, None, blocks_TB, 1, case.candidate_block)
        return _given(case, ids_TK, blocks_TB, scores_TK)

    step = min(rows, rows_at_a_time(case, limit))
    width = padded_width(limit, case.topk)
    scores_TW = seen_T.new_empty(step, width, dtype=torch.float32)
    source = None
    for start in range(0, rows, max(step, 1)):
        part = slice(start, start + step)
        q, weights_TH, sequence_T, seen_t, candidates = (_part(of, part) for of in rows_of)
        some = Rows(q, weights_TH, sequence_T, seen_t, candidates, scores_TW[: rows - start])
        if not pieces:
            lists = key_rows[part] if own_lists else key_rows
            source = listed(case, keys, lists, limit)
            score(launch, case, some, source, own_lists, skipped, tile)
        for piece in pieces:
            if source is None or len(pieces) > 1:
                source = None  # its memory is taken for the next
                source = in_order(launch, case, keys, key_rows, piece)
            score(launch, case, some, source, own_lists, skipped, tile)
        names = _names(case, key_rows[part] if own_lists else None, some.candidates_TB)
        best(launch, case.topk, some.scores_TW, some.seen_T, limit, ids_TK[part], *names)
        if case.publishes:
            _publish(launch, case, some, limit, blocks_TB[part])
        if scores_TK is not None:
            scores_TK[part] = _scores_of(some.scores_TW, ids_TK[part])
    if scores_TK is not None and case.gives_rows:
        ids_TK = listed_rows(key_rows, ids_TK)
    return _given(case, ids_TK, blocks_TB, scores_TK)


def _skipped(case: IndexCase) -> int:
    """Entries of rows that see no more, of which no score is wanted."""
    if case.gives_scores:
        return 0
    if case.publishes:
        return min(case.topk, case.candidate_blocks * case.candidate_block)
    return case.topk


def _given(
    case: IndexCase,
    ids_TK: torch.Tensor,
    blocks_TB: torch.Tensor,
    scores_TK: torch.Tensor | None,
) -> Chosen:
    if scores_TK is not None:
        return ids_TK, scores_TK
    return (ids_TK, blocks_TB) if case.publishes else ids_TK


def _scores_of(scores_TW: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """As they were compared."""
    least = torch.finfo(torch.float32).min
    found_TK = scores_TW.gather(1, ids_TK.clamp(min=0)).nan_to_num_(least, torch.inf, least)
    return found_TK.masked_fill_(ids_TK < 0, -torch.inf)


def _names(
    case: IndexCase, own_rows_TE: torch.Tensor | None, candidates_TB: torch.Tensor | None
) -> tuple[torch.Tensor | None, int]:
    """Blocks that places of scores lie in, and entries of a block: a list of rows is one of blocks
    of one entry each."""
    if case.gives_rows and not case.gives_scores and own_rows_TE is not None:
        return own_rows_TE, 1
    return candidates_TB, case.candidate_block


def _part(of: Any, part: slice) -> Any:
    if isinstance(of, tuple):
        return tuple(tensor[part] for tensor in of)
    return None if of is None else of[part]


def _see_candidates(
    launch: Launcher, case: IndexCase, candidates_TB: torch.Tensor, seen_T: torch.Tensor
) -> int:
    """Counts what rows see in their candidate blocks; returns how much that is at most."""
    rows, blocks = candidates_TB.shape
    launch(
        see_candidates,
        (rows,),
        candidates_TB,
        seen_T,
        blocks,
        WIDTH=next_power_of_2(blocks),
        SIZE=case.candidate_block,
    )
    return blocks * case.candidate_block


def _take_all(
    launch: Launcher,
    seen_T: torch.Tensor,
    candidates_TB: torch.Tensor | None,
    out_TK: torch.Tensor,
    size: int,
    per: int = 1,
) -> None:
    most = out_TK.shape[1]
    launch(
        take_all,
        (len(seen_T),),
        seen_T,
        candidates_TB,
        out_TK,
        0 if candidates_TB is None else candidates_TB.stride(0),
        K=most,
        K_POWER=next_power_of_2(most),
        SIZE=size,
        PER=per,
    )


def _publish(
    launch: Launcher, case: IndexCase, rows: Rows, limit: int, blocks_TB: torch.Tensor
) -> None:
    """Writes the candidate blocks of rows that have been scored."""
    count, most = len(rows.seen_T), case.candidate_blocks
    blocks = cdiv(limit, case.candidate_block)
    width = padded_width(blocks, most)
    best_TN = rows.scores_TW.new_empty(count, width)
    seen_blocks_T = torch.empty_like(rows.seen_T)
    launch(
        best_in_blocks,
        (count, cdiv(blocks, 256)),
        rows.scores_TW,
        rows.seen_T,
        best_TN,
        seen_blocks_T,
        rows.scores_TW.shape[1],
        width,
        SIZE=case.candidate_block,
        BLOCKS=256,
    )
    best(launch, most, best_TN, seen_blocks_T, blocks, blocks_TB)


BACKENDS = (
    Declared("attention.index_topk", index_topk, eligible),
    Declared("attention.index_topk_decode", index_topk_decode, eligible),
)
