"""Inputs for attention."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, ceil_div, garbage_but
from metainfer.kernels.reference.formats import encode_rows
from metainfer.ops.attention import DENSE
from metainfer.ops.base import Load
from metainfer.ops.formats import FORMATS

# Different rows of a large cache, which repeats them, and rows of the largest cache that is made.
_DRAWN_ROWS = 2**12
_MOST_ROWS = 2**19


def _queries(case: Any, draw: Draw, rows: int, sharpness: float = 1.0) -> torch.Tensor:
    return draw.normal(rows, case.heads, case.key_width, dtype=case.dtype, scale=sharpness)


def _sinks(case: Any, draw: Draw) -> torch.Tensor | None:
    return draw.normal(case.heads, scale=2.0) if case.sink else None


def _cache(case: Any, draw: Draw, rows: int, row_format: str, dtype: str = "") -> torch.Tensor:
    """Rows of a cache in a format; plain numbers in `dtype`, else the draw's or case's."""
    if row_format == DENSE:
        return draw.normal(rows, case.key_width, dtype=dtype or draw.cache_dtype or case.dtype)
    if draw.shapes_only:
        shape = rows, FORMATS[row_format].row_bytes
        return torch.empty(shape, dtype=torch.uint8, device=draw.device)
    return encode_rows(row_format, draw.normal(rows, case.key_width))


def sparse_prefill(
    case: Any,
    draw: Draw,
    rows: int,
    start: int,
    sequences: int = 1,
    halo: int | None = None,
    sharpness: float = 1.0,
    dtype: str = "",
    select: bool = True,
    shuffled: bool = False,
) -> Call:
    """`rows` consecutive rows of each of some sequences, those of the first from the position
    `start` on and of each further one from one 7 higher; `halo` latents of each, or as
    many as are seen, lie before them."""
    starts = [start + 7 * number for number in range(sequences)]
    halos = [max(0, min(at, case.window - 1), halo or 0) for at in starts]
    order = torch.arange(rows * sequences)
    if shuffled:
        order = draw.distinct(1, rows * sequences, rows * sequences)[0].cpu()
    positions_T = torch.cat([torch.arange(at, at + rows) for at in starts])[order]
    sequence_T = torch.arange(sequences).repeat_interleave(rows)[order]
    before_B = torch.tensor(halos).cumsum(0)
    latent_rows_T = before_B[sequence_T] + order
    positions_T, sequence_T, latent_rows_T = (
        numbers.to(draw.device) for numbers in (positions_T, sequence_T, latent_rows_T)
    )
    q_THK = _queries(case, draw, rows * sequences, sharpness)
    window: tuple[Any, ...] = (None, None)
    if case.window:
        latents_ND = draw.normal(sum(halos) + len(q_THK), case.key_width, dtype=case.dtype)
        window = latents_ND, latent_rows_T
    sink_H = _sinks(case, draw)
    if case.ratio == 0:
        return Call((), (q_THK, positions_T, *window, sink_H, None, None, None, None))
    most = (starts[-1] + rows) // case.ratio
    entries = _cache(case, draw, sequences * most + 6, case.entry_format, dtype)
    entry_rows_BE = draw.distinct(1, sequences * most, len(entries)).view(sequences, most)
    for number, at in enumerate(starts):
        entry_rows_BE[number, (at + rows) // case.ratio :] = -1
    garbage_but(entry_rows_BE, entries)
    selected_TK = None
    if case.topk and select:
        # Any of the entries that a row sees, in any order, with gaps; the second row has none.
        selected_TK = draw.distinct(len(q_THK), case.topk, max(most, case.topk))
        seen_T1 = (positions_T[:, None] + 1) // case.ratio
        hidden_TK = draw.integers(0, 4, *selected_TK.shape) == 0
        selected_TK[(selected_TK >= seen_T1) | hidden_TK] = -1
        selected_TK[1:2] = -1
    rows_of = None if sequences == 1 else sequence_T
    table = entries, entry_rows_BE, rows_of, selected_TK
    return Call((), (q_THK, positions_T, *window, sink_H, *table))


def sparse_prefill_far_below(case: Any, draw: Draw, rows: int, start: int) -> Call:
    """Scores of numbers are all the same and below -1e34, but far above the sinks."""
    call = sparse_prefill(case, draw, rows, start)
    if case.ratio and case.entry_format != DENSE:
        return call
    q_THK, _, latents_ND, _, sink_H, entries, *_ = call.arguments
    for numbers, number in ((q_THK, 1e16), (latents_ND, -1e18), (entries, -1e18), (sink_H, -1e37)):
        if numbers is not None:
            numbers.fill_(number)
    return call


def sparse_prefill_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """The last rows of a sequence of `load.tokens`, or of several, which have their entries in
    common."""
    count = load.sequences
    each = load.rows // count
    tokens = max(load.tokens, each)
    start = tokens - each
    positions_T = torch.arange(start, tokens, device=draw.device).repeat(count)
    sequence_T = torch.arange(count, device=draw.device).repeat_interleave(each)
    window: tuple[Any, ...] = (None, None)
    if case.window:
        halo = min(start, case.window - 1)
        latents_ND = draw.normal((halo + each) * count, case.key_width, dtype=case.dtype)
        window = latents_ND, positions_T - (start - halo) + sequence_T * (halo + each)
    table: tuple[Any, ...] = (None, None, None, None)
    if case.ratio:
        entries = tokens // case.ratio
        entry_rows_BE = draw.spread(count, entries, entries + entries // 8)
        cache = _large_cache(case, draw, entries + entries // 8, case.entry_format)
        table = cache, entry_rows_BE, sequence_T if count > 1 else None, None
        if case.topk and entries > case.topk:
            seen_T1 = (positions_T.unsqueeze(1) + 1) // case.ratio
            table = *table[:3], _chosen(draw, case.topk, seen_T1)
    q_THK = _queries(case, draw, len(positions_T))
    return Call((), (q_THK, positions_T, *window, _sinks(case, draw), *table))


def _chosen(draw: Draw, count: int, seen_T1: torch.Tensor) -> torch.Tensor:
    """int64 [T, K], entries below seen_T1, one out of each of K equal parts; -1 for empty parts."""
    edge_K = torch.arange(count, device=draw.device)
    first_TK = edge_K * seen_T1 // count
    size_TK = (edge_K + 1) * seen_T1 // count - first_TK
    share_TK = draw.integers(0, 2**16, len(seen_T1), count)
    return torch.where(size_TK > 0, first_TK + (share_TK * size_TK >> 16), -1)


def sparse_decode(
    case: Any,
    draw: Draw,
    rows: int,
    columns: int | None = None,
    full: bool = False,
    sharpness: float = 1.0,
    dtype: str = "",
) -> Call:
    q_THK = _queries(case, draw, rows, sharpness)
    sink_H = _sinks(case, draw)
    ring: tuple[Any, ...] = (None, None)
    if case.window:
        ring = _listed_rows(case, draw, (rows, case.window), case.window_format, full, dtype)
    if case.ratio == 0:
        return Call((), (q_THK, *ring, sink_H, None, None))
    shape = rows, (case.topk or 7) if columns is None else columns
    entries = _listed_rows(case, draw, shape, case.entry_format, full, dtype)
    return Call((), (q_THK, *ring, sink_H, *entries))


def sparse_decode_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """One row of each of `load.rows` sequences of `load.tokens`, all with full lists. Where the
    caches of so many would be huge, their rows lie closer together."""
    rows = load.rows
    ring: tuple[Any, ...] = (None, None)
    if case.window:
        seen = min(load.tokens, case.window)
        window_rows_TW = torch.full((rows, case.window), -1, device=draw.device)
        ring_rows = rows * case.window
        own_TW = torch.arange(ring_rows, device=draw.device).view(rows, case.window)
        window_rows_TW[:, case.window - seen :] = own_TW[:, case.window - seen :]
        ring = _large_cache(case, draw, ring_rows, case.window_format), window_rows_TW
    table: tuple[Any, ...] = (None, None)
    if case.ratio:
        entries = load.tokens // case.ratio
        chosen = min(entries, case.topk) if case.topk else entries
        all_rows = max(min(rows * entries, _MOST_ROWS), rows * chosen, 1)
        entry_rows_TK = draw.spread(1, rows * chosen, all_rows).view(chosen, rows)
        cache = _large_cache(case, draw, all_rows, case.entry_format)
        table = cache, entry_rows_TK.T.contiguous()
    return Call((), (_queries(case, draw, rows), *ring, _sinks(case, draw), *table))


def _listed_rows(
    case: Any, draw: Draw, shape: tuple[int, int], row_format: str, full: bool, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and lists of its rows; -1 in any place, everywhere in the third list."""
    count = shape[0] * shape[1]
    cache = _cache(case, draw, count + 9, row_format, dtype)
    listed_TK = draw.distinct(1, count, len(cache)).view(shape)
    if not full:
        listed_TK[draw.integers(0, 3, *shape) == 0] = -1
        listed_TK[2:3] = -1
    return garbage_but(listed_TK, cache), listed_TK


def _large_cache(case: Any, draw: Draw, rows: int, row_format: str) -> torch.Tensor:
    drawn = _cache(case, draw, min(rows, _DRAWN_ROWS), row_format)
    return drawn.repeat(max(1, ceil_div(rows, _DRAWN_ROWS)), 1)[:rows]


def merge(
    case: Any, draw: Draw, rows: int, shards: int = 3, dtype: str = "", full: bool = False
) -> Call:
    """Results of shards; in the first some rows see nothing, and the third row sees nothing."""
    out_STHD = draw.normal(shards, rows, case.heads, case.width, dtype=dtype or case.dtype)
    lse_STH = draw.normal(shards, rows, case.heads, scale=5.0)
    if not full:
        lse_STH[0, ::2] = -torch.inf
        lse_STH[:, 2:3] = -torch.inf
        out_STHD.masked_fill_(lse_STH.isneginf().unsqueeze(-1), 0.0)
    return Call((), (out_STHD, lse_STH))


def merge_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """Of two shards."""
    return merge(case, draw, load.rows, shards=2, full=True)
