"""Results that are codes, as the numbers that they stand for.

Where a sum or a product before the encoding is rounded in another way, a code may be its neighbour.
So codes are compared by their numbers: no number is off by more than a step of its format, and few
are off at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference.dequantise import scales_to_float
from metainfer.kernels.reference.formats import decode_e4m3, decode_index, decode_rows
from metainfer.ops.cache import DENSE
from metainfer.ops.formats import FORMATS, INDEX_FORMATS

STEPS: Mapping[str, float] = MappingProxyType({"e4m3": 1 / 13, "e2m1": 0.4})
"""The largest step between codes, relative to the largest code, and a little more: the scale may be
another too."""
FEW = 0.01
"""Share of numbers that may be another code."""

WRITTEN: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"cache.write": (3,), "attention.compress_step": (3, 8)}
)
"""Arguments that an op writes and does not return, by place: results too."""

Results = tuple[torch.Tensor, ...]


def _groups(case: Any, call: Call, results: Results) -> Results:
    """Codes [T, I] and scales [T, G], and what follows as it is."""
    codes, scales, *others = results
    numbers = decode_e4m3(codes).unflatten(-1, (scales.shape[-1], -1))
    return ((numbers * scales_to_float(scales).unsqueeze(-1)).flatten(-2), *others)


def _queries(case: Any, call: Call, results: Results) -> Results:
    return (decode_index(case.format, *results),)


def _keys(case: Any, call: Call, results: Results) -> Results:
    """The keys that were written, and the bytes of the others."""
    listed, others = _listed(call.arguments[6].to(results[0].device), len(results[0]))
    keys = decode_index(case.format, *(part[listed] for part in results))
    return (keys, *(part[others] for part in results))


def _cache(case: Any, call: Call, results: Results) -> Results:
    """The rows that were returned and those that were written, and the bytes of the others."""
    y_TD, cache = results
    listed, others = _listed(call.arguments[4].to(cache.device), len(cache))
    written = cache[listed]
    rows = written.float() if case.format == DENSE else decode_rows(case.format, written)
    return y_TD, rows, cache[others].view(torch.uint8)


def _listed(rows_T: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that are listed, in order, and all others."""
    listed = rows_T[rows_T >= 0]
    other = torch.ones(count, dtype=torch.bool, device=rows_T.device)
    other[listed] = False
    return listed, other.nonzero().flatten()


NUMBERS: Mapping[str, Callable[[Any, Call, Results], Results]] = MappingProxyType(
    {
        "norm.rms_norm_fp8": _groups,
        "quantise.fp8": _groups,
        "moe.swiglu_fp8": _groups,
        "hc.expand_mix_fp8": _groups,
        "index.encode_queries": _queries,
        "cache.write_index": _keys,
        "cache.write": _cache,
    }
)
"""By op: (case, the inputs, results) -> results as numbers, and bytes that must be equal."""

CODES_AT: Mapping[str, int] = MappingProxyType({"cache.write": 1})
"""Which of these numbers are those of codes, by op; of the others the first."""


def step(op: str, case: Any) -> float:
    """How far a number may be off, relative to the largest; 0 where numbers are not codes."""
    name = getattr(case, "format", "")
    if NUMBERS.get(op) is _groups:
        return STEPS["e4m3"]
    if name in FORMATS:
        return STEPS[FORMATS[name].code]
    return STEPS[INDEX_FORMATS[name].code] if name in INDEX_FORMATS else 0.0
