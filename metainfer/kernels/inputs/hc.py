"""Inputs for hyper-connections."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, apart


def _streams(case: Any, draw: Draw, rows: int) -> torch.Tensor:
    return draw.normal(rows, case.streams, case.width, dtype=case.stream_dtype)


def mix(case: Any, draw: Draw, rows: int, sharpness: float = 1.0) -> Call:
    numbers = case.streams * case.width
    fn_MK = draw.normal(case.mixes, numbers, scale=numbers**-0.5)
    scale_3 = draw.normal(3).abs() * sharpness
    return Call((fn_MK, draw.normal(case.mixes), scale_3), (_streams(case, draw, rows),))


def mix_norm(case: Any, draw: Draw, rows: int, sharpness: float = 1.0) -> Call:
    mixed = mix(case, draw, rows, sharpness)
    return Call((*mixed.weights, draw.normal(case.width)), mixed.arguments)


def mix_shifted(case: Any, draw: Draw, rows: int, first: bool = False) -> Call:
    """
    Args:
        first: collapse one stream alone, as the first sublayer of a model does.
    """
    mixed, collapsed = mix(case, draw, rows), collapse(case, draw, rows)
    given_TS = collapsed.arguments[1]
    if first:
        given_TS[:, 0], given_TS[:, 1:] = 1.0, 0.0
    return Call((*mixed.weights, *collapsed.weights), (*mixed.arguments, given_TS))


def collapse(case: Any, draw: Draw, rows: int) -> Call:
    norm_weight_D = draw.normal(case.width) if case.normed else None
    given_TS = draw.normal(rows, case.streams).sigmoid() + case.eps
    return Call((norm_weight_D,), (_streams(case, draw, rows), given_TS))


def expand(case: Any, draw: Draw, rows: int, dtype: str = "", more: str = "") -> Call:
    """
    Args:
        dtype: of y; "" for that of the case.
        more: of what is added to it; "" for nothing.
    """
    y_TD = draw.normal(rows, case.width, dtype=dtype or case.dtype)
    post_TS = draw.normal(rows, case.streams)
    comb_TSS = draw.normal(rows, case.streams, case.streams).softmax(-1)
    added = (draw.normal(rows, case.width, dtype=more),) if more else ()
    return Call((), (_streams(case, draw, rows), y_TD, post_TS, comb_TSS, *added))


def expand_mix_fp8(
    case: Any,
    draw: Draw,
    rows: int,
    dtype: str = "",
    more: str = "",
    first: bool = False,
    sharpness: float = 1.0,
    spread: bool = False,
) -> Call:
    """
    Args:
        dtype, more: as of `expand`.
        first: nothing is to be expanded.
        spread: rows of y lie apart.
    """
    mixed = mix_norm(case.hyper, draw, rows, sharpness)
    if first:
        return Call(mixed.weights, (*mixed.arguments, None, None, None, None))
    streams_TSD, y_TD, *others = expand(case.hyper, draw, rows, dtype, more).arguments
    added = others[2:] or [None]
    y_TD = apart(y_TD) if spread else y_TD
    return Call(mixed.weights, (streams_TSD, y_TD, *others[:2], *added))


def head(case: Any, draw: Draw, rows: int) -> Call:
    numbers = case.streams * case.width
    fn_SK = draw.normal(case.streams, numbers, scale=numbers**-0.5)
    return Call((fn_SK, draw.normal(case.streams), draw.normal(1)), (_streams(case, draw, rows),))
