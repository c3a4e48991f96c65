"""Inputs for compressors."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart, garbage_but
from metainfer.ops.base import Load


def compress(case: Any, draw: Draw, entries: int, first: int, sharpness: float = 1.0) -> Call:
    rows_NW = draw.normal((entries + case.overlap) * case.ratio, case.row_width, scale=sharpness)
    if case.overlap and first == 0:
        rows_NW[: case.ratio] = torch.nan
    rotation_ER2 = draw.rotation(entries, case.rope_width)
    return Call((), (apart(rows_NW), first, draw.normal(case.width), rotation_ER2))


def compress_decode(case: Any, draw: Draw, entries: int, closing: bool = True) -> Call:
    """
    Args:
        closing: every window closes; otherwise every second entry has no token.
    """
    ring_NW = draw.normal((entries + 2) * case.span, case.row_width)
    ring_rows_CS = draw.distinct(1, entries * case.span, len(ring_NW)).view(entries, case.span)
    if case.overlap:
        ring_rows_CS[::2, : case.ratio] = -1  # the first window of a sequence
    if not closing:
        ring_rows_CS[1::2] = -1
    garbage_but(ring_rows_CS, ring_NW)
    rotation_CR2 = draw.rotation(entries, case.rope_width)
    return Call((), (ring_NW, ring_rows_CS, draw.normal(case.width), rotation_CR2))


def compress_step(
    case: Any,
    draw: Draw,
    rows: int,
    together: int = 1,
    closing: bool = True,
    cache: str = "float32",
    spread: bool = False,
) -> Call:
    """
    Args:
        together: rows of one sequence.
        closing: the last row of every sequence closes a window; otherwise no row does.
        cache: of plain numbers; "" for none.
    """
    ring = case.span + together - 1
    row_T = torch.arange(rows, device=draw.device)
    sequence_T, place_T = row_T // together, row_T % together
    # Positions behind the ring's first turn; the last row of a sequence ends a window.
    last = (ring // case.ratio + 3) * case.ratio - (1 if closing else 2)
    position_T = last - (together - 1 - place_T)
    back_S = torch.arange(1 - case.span, 1, device=draw.device)
    list_TS = sequence_T[:, None] * ring + (position_T[:, None] + back_S) % ring
    closes_T = (position_T + 1) % case.ratio == 0
    ring_NW = draw.normal((rows + 1) * ring, case.row_width)
    state_TW = draw.normal(rows, case.row_width)
    cache_MD = draw.normal(rows + 3, case.width, dtype=cache) if cache else None
    return Call(
        (),
        (
            apart(state_TW) if spread else state_TW,
            draw.normal(case.ratio, case.row_width),
            position_T % case.ratio,
            ring_NW,
            sequence_T * ring + position_T % ring,
            torch.where(closes_T[:, None], list_TS, -1),
            draw.normal(case.width),
            draw.rotation(rows, case.rope_width),
            cache_MD,
            torch.where(closes_T, row_T + 2, -1),
        ),
    )


def compress_step_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """Every row closes a window of its own."""
    return compress_step(case, draw, load.rows, cache=draw.cache_dtype or case.dtype)


def compress_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """The windows that close while `load.rows` tokens come in, behind others."""
    return compress(case, draw, entries=max(1, load.rows // case.ratio), first=1)


def compress_decode_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """Every row closes a window of its own."""
    ring_NW = draw.normal((load.rows + 2) * case.span, case.row_width)
    rows_CS = draw.spread(1, load.rows * case.span, len(ring_NW)).view(load.rows, case.span)
    rotation_CR2 = draw.rotation(load.rows, case.rope_width)
    return Call((), (ring_NW, rows_CS, draw.normal(case.width), rotation_CR2))
