"""Weights of experts in the form in which kernels want them.

fp4: byte j of the 16 of a group of 32 columns holds column j in its low nibble and column 16 + j in
its high one, so that four bytes become eight codes that lie in two runs of four columns.

For products with e4m3 the scales of a row's groups are folded into the codes. A magnitude of e2m1
times 2^s is an e4m3 number, and no subnormal one, for s from -5 to 6; so where the scales of a row
are at most 2^11 apart, each number is an e4m3 number times one factor of the row, exactly. What
is kept of a group is (s + 5) << 3, which its codes get added. Other weights are multiplied in bf16,
which holds every product of e2m1 and e8m0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch

from metainfer.kernels.reference.dequantise import scales_to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES

_log = logging.getLogger(__name__)

_GROUP = 32
_TOP = 6  # the largest s: 6 * 2^6 is an e4m3 number
_SPAN = 11
_ELEMENTS_AT_A_TIME = 2**28


class Matrix(NamedTuple):
    """One matrix of all experts, [E, N, C] as numbers.

    Attributes:
        form: "dense": numbers; "fp8": e4m3 codes; "fp4": codes; "folded": codes of fp4 whose
            scales are what codes get added.
        codes: [E, N, C], or uint8 [E, N, C / 2].
        scales: "fp8": fp32 [E, blocks, blocks]; "fp4": uint8 (e8m0), "folded": uint8, both
            [E, N, C / 32].
        factors: "folded": fp32 [E, N].
    """

    form: str
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    factors: torch.Tensor | None = None


class Experts(NamedTuple):
    """Gate and below it up, and down, of all experts."""

    gate_up: Matrix
    down: Matrix


def dense_matrix(dtype: str, *weights: tuple[torch.Tensor, ...]) -> Matrix:
    """Of weights that lie one below the other, as the others here."""
    return Matrix("dense", _stacked([weight.to(TORCH_DTYPES[dtype]) for (weight,) in weights]))


def fp8_matrix(*weights: tuple[torch.Tensor, ...]) -> Matrix:
    codes = _stacked([codes.view(torch.uint8) for codes, _ in weights])
    return Matrix("fp8", codes, _stacked([scales_to_float(scale) for _, scale in weights]))


def fp4_matrix(*weights: tuple[torch.Tensor, ...]) -> Matrix:
    codes = _stacked([repacked(packed) for packed, _ in weights])
    return Matrix("fp4", codes, _stacked([scale for _, scale in weights]))


def folded_matrix(name: str, *weights: tuple[torch.Tensor, ...]) -> Matrix:
    """Folded, or as of `fp4_matrix` where that cannot be, which is said in the log."""
    reasons = [reason for _, scale in weights if (reason := cannot_fold(scale))]
    matrix = fp4_matrix(*weights)
    if reasons:
        _log.info("%s of experts is multiplied in bf16: %s", name, reasons[0])
        return matrix
    assert matrix.scales is not None
    return Matrix("folded", matrix.codes, *folded(matrix.scales))


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()


def cannot_fold(scale: torch.Tensor) -> str:
    """Why the scales of a matrix cannot be folded; "" where they can. Shapes without numbers
    can."""
    if scale.is_meta or not scale.numel():
        return ""
    low, high = (int(bound.min()) for bound in (scale.amin(-1), scale.amax(-1)))
    apart = int((scale.amax(-1) - scale.amin(-1)).max())
    if int(scale.max()) == 255:
        return "a scale is NaN"
    if apart > _SPAN:
        return f"scales of a row are 2^{apart} apart, more than 2^{_SPAN}"
    return "a scale is below the normal numbers of fp32" if min(low, high - _TOP) < 1 else ""


def folded(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e8m0 [E, N, C / 32] -> what codes get added, uint8 of the same shape, and the factors of
    rows, fp32 [E, N]."""
    added = torch.empty_like(scale)
    factors = scale.new_empty(scale.shape[:2], dtype=torch.float32)
    for part in _parts(scale):
        top = scale[part].amax(-1, keepdim=True)
        added[part] = (scale[part] + _SPAN - top) << 3
        factors[part] = scales_to_float(top.squeeze(-1) - _TOP)
    return added, factors


def repacked(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, C / 2], the even column of two neighbours in the low nibble -> the same numbers
    in the order of this module."""
    result = torch.empty_like(packed, memory_format=torch.contiguous_format)
    for part in _parts(packed):
        groups = packed[part].unflatten(-1, (-1, _GROUP // 2))
        columns = torch.stack([groups & 15, groups >> 4], dim=-1).flatten(-2)
        low, high = columns.chunk(2, dim=-1)
        result[part] = (low | (high << 4)).flatten(-2)
    return result


def _parts(of_experts: torch.Tensor) -> Iterator[slice]:
    """Experts, as many at a time as temporaries may take memory for."""
    each = max(1, of_experts[0].numel() if len(of_experts) else 1)
    step = max(1, _ELEMENTS_AT_A_TIME // (8 * each))
    for first in range(0, len(of_experts), step):
        yield slice(first, first + step)
