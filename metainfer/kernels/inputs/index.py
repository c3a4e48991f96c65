"""Inputs for the indexer."""

from __future__ import annotations

from typing import TypeAlias

import torch

from metainfer.kernels.inputs.base import DTYPES, Call, Draw, apart, ceil_div, garbage_but
from metainfer.kernels.reference.formats import encode_index
from metainfer.ops.base import Load
from metainfer.ops.formats import INDEX_FORMATS
from metainfer.ops.index import DENSE, IndexCase

Coded: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def index_topk(
    case: IndexCase,
    draw: Draw,
    rows: int,
    start: int,
    entries: int | None = None,
    kind: str = "normal",
    dtype: str = "",
) -> Call:
    """Consecutive rows of one sequence."""
    entries = (start + rows) // case.ratio if entries is None else entries
    q, weights_TH = _queries(case, draw, rows, kind)
    key_rows_1E = draw.distinct(1, entries, entries + 5)
    keys = _keys(case, draw, entries + 5, kind, dtype, key_rows_1E)
    positions_T = torch.arange(start, start + rows, device=draw.device)
    seen_T = ((positions_T + 1) // case.ratio).clamp(max=entries)
    candidates_TB = _candidates(case, draw, seen_T)
    return Call((), (q, weights_TH, keys, key_rows_1E, None, positions_T, candidates_TB))


def index_topk_ragged(
    case: IndexCase,
    draw: Draw,
    parts: tuple[tuple[int, int], ...],
    shuffled: bool = False,
    kind: str = "normal",
) -> Call:
    """Rows of several sequences, each with its own list of entries.

    Args:
        parts: (first position, rows) of each sequence.
        shuffled: rows come in any order.
    """
    ends = torch.tensor([start + rows for start, rows in parts], device=draw.device)
    counts_B1 = (ends // case.ratio).unsqueeze(1)
    entries = int(counts_B1.max()) + 2
    key_rows_BE = draw.distinct(1, len(parts) * entries, len(parts) * entries + 5).view(-1, entries)
    key_rows_BE[torch.arange(entries, device=draw.device) >= counts_B1] = -1
    wide_BE = torch.nn.functional.pad(key_rows_BE, (0, 3), value=-1)
    keys = _keys(case, draw, key_rows_BE.numel() + 5, kind, "", key_rows_BE)
    sequence_T = torch.cat([torch.full((rows,), b) for b, (_, rows) in enumerate(parts)])
    positions_T = torch.cat([torch.arange(start, start + rows) for start, rows in parts])
    sequence_T, positions_T = sequence_T.to(draw.device), positions_T.to(draw.device)
    if shuffled:
        order_T = draw.distinct(1, len(positions_T), len(positions_T))[0]
        sequence_T, positions_T = sequence_T[order_T], positions_T[order_T]
    q, weights_TH = _queries(case, draw, len(positions_T), kind)
    candidates_TB = _candidates(case, draw, (positions_T + 1) // case.ratio)
    lists = (wide_BE[:, :entries], sequence_T, positions_T, candidates_TB)
    return Call((), (q, weights_TH, keys, *lists))


def index_topk_decode(
    case: IndexCase,
    draw: Draw,
    rows: int,
    entries: int,
    kind: str = "normal",
    dtype: str = "",
    padding: int = 0,
) -> Call:
    """Rows of different sequences; the lists have `padding` more columns than the longest needs."""
    q, weights_TH = _queries(case, draw, rows, kind)
    key_rows_TE = draw.distinct(1, rows * entries, rows * entries + 5).view(rows, entries)
    seen_T1 = draw.integers(0, entries + 1, rows, 1)
    seen_T1[:1] = entries
    seen_T1[2:3] = 0  # a row that sees nothing
    key_rows_TE[torch.arange(entries, device=draw.device) >= seen_T1] = -1
    keys = _keys(case, draw, rows * entries + 5, kind, dtype, key_rows_TE)
    key_rows_TE = torch.nn.functional.pad(key_rows_TE, (0, padding + 2), value=-1)
    candidates_TB = _candidates(case, draw, seen_T1.squeeze(1))
    listed_TE = key_rows_TE[:, : entries + padding]
    return Call((), (q, weights_TH, keys, listed_TE, candidates_TB))


def index_topk_at_load(case: IndexCase, draw: Draw, load: Load) -> Call:
    """The last rows of one sequence, or of several, which have their entries in common."""
    entries, count = load.tokens // case.ratio, load.sequences
    each = load.rows // count
    positions_T = torch.arange(load.tokens - each, load.tokens, device=draw.device).repeat(count)
    sequence_T = torch.arange(count, device=draw.device).repeat_interleave(each)
    seen_T1 = ((positions_T + 1) // case.ratio).unsqueeze(1)
    key_rows_BE = draw.spread(count, entries, entries + entries // 4)
    queries = _queries_at_load(case, draw, each * count)
    keys = _coded_at_load(case, draw, draw.cache_dtype, entries + entries // 4)
    candidates_TB = _candidates_at_load(case, draw, seen_T1, entries)
    lists = (key_rows_BE, sequence_T if count > 1 else None, positions_T, candidates_TB)
    return Call((), (*queries, keys, *lists))


def index_topk_decode_at_load(case: IndexCase, draw: Draw, load: Load) -> Call:
    """One row of each of several sequences, equally long."""
    entries = load.tokens // case.ratio
    cache_rows = load.rows * (entries + entries // 4)
    key_rows_TE = draw.spread(1, load.rows * entries, cache_rows).view(load.rows, entries)
    queries = _queries_at_load(case, draw, load.rows)
    keys = _coded_at_load(case, draw, draw.cache_dtype, cache_rows)
    seen_T1 = torch.full((load.rows, 1), entries, device=draw.device)
    candidates_TB = _candidates_at_load(case, draw, seen_T1, entries)
    return Call((), (*queries, keys, key_rows_TE, candidates_TB))


def _queries(case: IndexCase, draw: Draw, rows: int, kind: str) -> tuple[Coded, torch.Tensor]:
    """Queries and head weights. "ties": one head with a weight and small whole numbers, so that
    many scores are exactly equal in any order of summation."""
    if kind == "normal":
        q_THI = draw.normal(rows, case.heads, case.width, dtype=case.dtype)
        return _coded(case, q_THI), apart(draw.normal(rows, case.heads))
    q_THI = draw.integers(-1, 2, rows, case.heads, case.width).to(DTYPES[case.dtype])
    weights_TH = torch.zeros(rows, case.heads, device=draw.device)
    weights_TH[:, 1] = draw.integers(-1, 2, rows).float()
    return _coded(case, q_THI), apart(weights_TH)


def _keys(
    case: IndexCase, draw: Draw, rows: int, kind: str, dtype: str, listed: torch.Tensor
) -> Coded:
    """A cache of keys in which rows that nobody listed read as NaN."""
    if kind == "normal":
        keys_MI = draw.normal(rows, case.width, dtype=dtype or case.dtype)
    else:
        keys_MI = draw.integers(-1, 2, rows, case.width).to(DTYPES[dtype or case.dtype])
    if kind == "nan":
        keys_MI[draw.integers(0, rows, rows // 3)] = torch.nan
    return _coded(case, garbage_but(listed, keys_MI))


def _coded(case: IndexCase, plain: torch.Tensor) -> Coded:
    return plain if case.key_format == DENSE else encode_index(case.key_format, plain)


def _candidates(case: IndexCase, draw: Draw, seen_T: torch.Tensor) -> torch.Tensor | None:
    """Some of the blocks that each row sees; none for the third row."""
    if not case.searches_candidates:
        return None
    blocks = max(1, ceil_div(int(seen_T.max()) if len(seen_T) else 0, case.candidate_block))
    seen_T1 = (-(-seen_T // case.candidate_block)).unsqueeze(1)
    named_TB = draw.distinct(len(seen_T), min(case.candidate_blocks, blocks), blocks)
    named_TB[(named_TB >= seen_T1) | (draw.integers(0, 6, *named_TB.shape) == 0)] = blocks
    named_TB[2:3] = blocks
    named_TB = named_TB.sort(1).values
    named_TB = named_TB.masked_fill(named_TB == blocks, -1)
    return torch.nn.functional.pad(
        named_TB, (0, case.candidate_blocks - named_TB.shape[1]), value=-1
    )


def _queries_at_load(case: IndexCase, draw: Draw, rows: int) -> tuple[Coded, torch.Tensor]:
    return _coded_at_load(case, draw, "", rows, case.heads), draw.normal(rows, case.heads)


def _coded_at_load(case: IndexCase, draw: Draw, dtype: str, *shape: int) -> Coded:
    """Numbers in `dtype`, else the case's, or codes and scales."""
    if case.key_format == DENSE:
        return draw.normal(*shape, case.width, dtype=dtype or case.dtype)
    form = INDEX_FORMATS[case.key_format]
    if form.code == "e2m1":
        codes = draw.integers(0, 256, *shape, form.code_bytes, dtype=torch.uint8)
    else:
        codes = draw.fp8(*shape, form.code_bytes).view(torch.uint8)
    scales = draw.scales(*shape, form.blocks, middle=120)
    if form.scale == "fp32":
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
        scales = scales.view(torch.uint8)
    return codes, scales


def _candidates_at_load(
    case: IndexCase, draw: Draw, seen_T1: torch.Tensor, entries: int
) -> torch.Tensor | None:
    if not case.searches_candidates:
        return None
    blocks = ceil_div(entries, case.candidate_block)
    named_TB = draw.spread(len(seen_T1), min(case.candidate_blocks, blocks), max(blocks, 1))
    seen = named_TB * case.candidate_block < seen_T1
    missing = case.candidate_blocks - named_TB.shape[1]
    return torch.nn.functional.pad(torch.where(seen, named_TB, -1), (0, missing), value=-1)
