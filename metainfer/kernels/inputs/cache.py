"""Inputs for writing caches and for encoding index keys and queries."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart
from metainfer.kernels.inputs.quantise import widened
from metainfer.kernels.reference.formats import encode_rows
from metainfer.ops.base import Load
from metainfer.ops.cache import DENSE
from metainfer.ops.formats import FORMATS, INDEX_FORMATS

_SPARE = 5  # cache rows that nobody writes


def write(
    case: Any,
    draw: Draw,
    rows: int,
    spread: bool = False,
    kind: str = "normal",
    dtype: str = "",
    large: bool = False,
) -> Call:
    """ "wide": numbers of all sizes, zeros among them. `large`: every row is written."""
    x_TD = _rows(draw, rows, case.width, case.dtype, spread, kind)
    weight_D = draw.normal(case.normed) if case.norm else None
    return Call(
        (), (x_TD, weight_D, _angles(case, draw, rows), *_written(case, draw, rows, dtype, large))
    )


def read(case: Any, draw: Draw, rows: int, spread: bool = False) -> Call:
    """Numbers of all sizes, one row twice. `spread`: rows lie apart."""
    form = FORMATS[case.format]
    cache = encode_rows(case.format, widened(draw, draw.normal(rows + _SPARE, form.width), 16))
    rows_T = draw.integers(0, rows + _SPARE, rows)
    rows_T[-1:] = rows_T[:1]
    if spread:
        cache = torch.cat([cache, cache[:, :16]], dim=1)[:, : form.row_bytes]
    return Call((), (cache, rows_T))


def read_at_load(case: Any, draw: Draw, load: Load) -> Call:
    form, rows = FORMATS[case.format], load.rows
    if draw.shapes_only:
        cache = _bytes(draw, rows + _SPARE, form.row_bytes)
    else:
        cache = encode_rows(case.format, draw.normal(rows + _SPARE, form.width))
    return Call((), (cache, draw.spread(1, rows, rows + _SPARE)[0]))


def write_index(
    case: Any,
    draw: Draw,
    rows: int,
    spread: bool = False,
    kind: str = "normal",
    large: bool = False,
) -> Call:
    x_TI = _rows(draw, rows, case.width, case.dtype, spread, kind)
    weight_I = draw.normal(case.width) if case.norm else None
    bias_I = draw.normal(case.width) if case.norm == "layer" else None
    form = INDEX_FORMATS[case.format]
    cache = [_bytes(draw, rows + _SPARE, size) for size in (form.code_bytes, form.scale_bytes)]
    angles = _angles(case, draw, rows)
    return Call((), (x_TI, weight_I, bias_I, angles, *cache, _places(draw, rows, large)))


def encode_queries(
    case: Any, draw: Draw, rows: int, spread: bool = False, kind: str = "normal"
) -> Call:
    q_TI = _rows(draw, rows, case.heads * case.width, case.dtype, spread, kind)
    q_THI = q_TI.unflatten(1, (case.heads, case.width))
    return Call((), (q_THI, _angles(case, draw, rows)))


def write_at_load(case: Any, draw: Draw, load: Load) -> Call:
    return write(case, draw, load.rows, large=True)


def write_index_at_load(case: Any, draw: Draw, load: Load) -> Call:
    return write_index(case, draw, load.rows, large=True)


def _rows(draw: Draw, rows: int, width: int, dtype: str, spread: bool, kind: str) -> torch.Tensor:
    x_TD = draw.normal(rows, width, dtype=dtype)
    if kind == "wide":
        x_TD = widened(draw, x_TD, 16)
    return apart(x_TD) if spread else x_TD


def _angles(case: Any, draw: Draw, rows: int) -> torch.Tensor | None:
    return draw.rotation(rows, case.rope_width) if case.rope_width else None


def _written(
    case: Any, draw: Draw, rows: int, dtype: str, large: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache full of garbage, and the rows to write."""
    if case.format == DENSE:
        kept = dtype or draw.cache_dtype or case.dtype
        cache = draw.normal(rows + _SPARE, case.width, dtype=kept)
    else:
        cache = _bytes(draw, rows + _SPARE, FORMATS[case.format].row_bytes)
    return cache, _places(draw, rows, large)


def _places(draw: Draw, rows: int, large: bool) -> torch.Tensor:
    if large:
        return draw.spread(1, rows, rows + _SPARE)[0]
    rows_T = draw.distinct(1, rows, rows + _SPARE)[0]
    rows_T[2::4] = -1
    return rows_T


def _bytes(draw: Draw, rows: int, size: int) -> torch.Tensor:
    return draw.integers(0, 256, rows, size, dtype=torch.uint8)
