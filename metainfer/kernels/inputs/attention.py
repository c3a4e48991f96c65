"""Inputs for attention."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, garbage_but


def sparse_prefill(
    case: Any,
    draw: Draw,
    rows: int,
    start: int,
    halo: int | None = None,
    sharpness: float = 1.0,
    dtype: str = "",
    select: bool = True,
) -> Call:
    halo = min(start, case.window - 1) if halo is None else halo
    q_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype, scale=sharpness)
    latents_ND = draw.normal(halo + rows, case.width, dtype=case.dtype)
    sink_H = draw.normal(case.heads, scale=2.0)
    if case.ratio == 0:
        return Call((), (q_THD, latents_ND, start, sink_H, None, None, None))
    entries = (start + rows) // case.ratio
    entries_MD = draw.normal(entries + 6, case.width, dtype=dtype or case.dtype)
    entry_rows_E = draw.distinct(1, entries, entries + 6)[0]
    garbage_but(entry_rows_E, entries_MD)
    selected_TK = None
    if case.topk and select:
        # Any of the entries that a row sees, in any order, with gaps; the second row has none.
        selected_TK = draw.distinct(rows, case.topk, max(entries, case.topk))
        seen_T1 = (torch.arange(start, start + rows, device=draw.device)[:, None] + 1) // case.ratio
        selected_TK[(selected_TK >= seen_T1) | (draw.integers(0, 4, rows, case.topk) == 0)] = -1
        selected_TK[1:2] = -1
    return Call((), (q_THD, latents_ND, start, sink_H, entries_MD, entry_rows_E, selected_TK))


def sparse_decode(
    case: Any,
    draw: Draw,
    rows: int,
    columns: int | None = None,
    full: bool = False,
    sharpness: float = 1.0,
    dtype: str = "",
) -> Call:
    q_THD = draw.normal(rows, case.heads, case.width, dtype=case.dtype, scale=sharpness)
    sink_H = draw.normal(case.heads, scale=2.0)
    ring = _listed_rows(case, draw, rows, case.window, full, dtype)
    if case.ratio == 0:
        return Call((), (q_THD, *ring, sink_H, None, None))
    columns = (case.topk or 7) if columns is None else columns
    return Call((), (q_THD, *ring, sink_H, *_listed_rows(case, draw, rows, columns, full, dtype)))


def _listed_rows(
    case: Any, draw: Draw, rows: int, columns: int, full: bool, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and lists of its rows; -1 in any place, everywhere in the third list."""
    cache_ND = draw.normal(rows * columns + 9, case.width, dtype=dtype or case.dtype)
    listed_TK = draw.distinct(1, rows * columns, len(cache_ND)).view(rows, columns)
    if not full:
        listed_TK[draw.integers(0, 3, rows, columns) == 0] = -1
        listed_TK[2:3] = -1
    return garbage_but(listed_TK, cache_ND), listed_TK
