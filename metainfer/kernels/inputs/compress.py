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


def compress_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """The windows that close while `load.rows` tokens come in, behind others."""
    return compress(case, draw, entries=max(1, load.rows // case.ratio), first=1)


def compress_decode_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """Every row closes a window of its own."""
    ring_NW = draw.normal((load.rows + 2) * case.span, case.row_width)
    rows_CS = draw.spread(1, load.rows * case.span, len(ring_NW)).view(load.rows, case.span)
    rotation_CR2 = draw.rotation(load.rows, case.rope_width)
    return Call((), (ring_NW, rows_CS, draw.normal(case.width), rotation_CR2))
