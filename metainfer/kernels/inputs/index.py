"""Inputs for the indexer."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import DTYPES, Call, Draw, apart, garbage_but


def _index_queries(
    case: Any, draw: Draw, rows: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and head weights. "ties": one head with a weight and small whole numbers, so that
    many scores are exactly equal in any order of summation."""
    if kind == "normal":
        q_THI = draw.normal(rows, case.heads, case.width, dtype=case.dtype)
        return q_THI, apart(draw.normal(rows, case.heads))
    q_THI = draw.integers(-1, 2, rows, case.heads, case.width).to(DTYPES[case.dtype])
    weights_TH = torch.zeros(rows, case.heads, device=draw.device)
    weights_TH[:, 1] = draw.integers(-1, 2, rows).float()
    return q_THI, apart(weights_TH)


def _index_keys(case: Any, draw: Draw, rows: int, kind: str, dtype: str) -> torch.Tensor:
    if kind == "normal":
        return draw.normal(rows, case.width, dtype=dtype or case.dtype)
    keys_MI = draw.integers(-1, 2, rows, case.width).to(DTYPES[dtype or case.dtype])
    if kind == "nan":
        keys_MI[draw.integers(0, rows, rows // 3)] = torch.nan
    return keys_MI


def index_topk(
    case: Any,
    draw: Draw,
    rows: int,
    start: int,
    entries: int | None = None,
    kind: str = "normal",
    dtype: str = "",
) -> Call:
    entries = (start + rows) // case.ratio if entries is None else entries
    q_THI, weights_TH = _index_queries(case, draw, rows, kind)
    keys_MI = _index_keys(case, draw, entries + 5, kind, dtype)
    key_rows_E = draw.distinct(1, entries, entries + 5)[0]
    garbage_but(key_rows_E, keys_MI)
    return Call((), (q_THI, weights_TH, keys_MI, key_rows_E, start))


def index_topk_decode(
    case: Any, draw: Draw, rows: int, entries: int, kind: str = "normal", dtype: str = ""
) -> Call:
    q_THI, weights_TH = _index_queries(case, draw, rows, kind)
    keys_MI = _index_keys(case, draw, rows * entries + 5, kind, dtype)
    key_rows_TE = draw.distinct(1, rows * entries, len(keys_MI)).view(rows, entries)
    seen_T1 = draw.integers(0, entries + 1, rows, 1)
    seen_T1[:1] = entries
    seen_T1[2:3] = 0  # a row that sees nothing
    key_rows_TE[torch.arange(entries, device=draw.device) >= seen_T1] = -1
    garbage_but(key_rows_TE, keys_MI)
    return Call((), (q_THI, weights_TH, keys_MI, key_rows_TE))
