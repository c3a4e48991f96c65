"""The generic path of an operation, `kernels.composed`, as a side of `bench ops`.

It knows plain numbers alone: coded caches, and rows in fp8 groups of products and experts, are
decoded beforehand, and candidates of blocks are ignored. Where there is no composition the
reference stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from metainfer.bench.ops_arguments import (
    DENSE,
    decoded_rows,
    dense_cache,
    dense_index,
    named_arguments,
)
from metainfer.kernels.composed import BACKENDS as COMPOSED
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.timing import Timed
from metainfer.ops.catalogue import OPS
from metainfer.ops.linear import Fp8BlockCase, GroupedCase
from metainfer.ops.moe import ExpertsCase

Side = Callable[[Any, Call], Timed]


def generic_side(op: str) -> Side:
    """What prepares the generic path of an operation."""
    return partial(_side, op)


def _side(op: str, case: Any, call: Call) -> Timed:
    op, case, arguments = _plain(op, case, call)
    backend = next(backend for backend in (*COMPOSED, *REFERENCES) if backend.op == op)
    if OPS[op].weights:
        prepare = backend.prepare
        arguments = (prepare(case, *call.weights) if prepare else call.weights, *arguments)
    return partial(backend.run, case, *arguments)


def _plain(op: str, case: Any, call: Call) -> tuple[str, Any, tuple[Any, ...]]:
    """Operation, case and arguments with plain numbers in place of codes."""
    if op in _OF_ROWS:
        codes, scales, *others = call.arguments
        plain_op, plain_case = _OF_ROWS[op]
        x = decoded_rows(case, codes, scales)
        if plain_op == "linear.grouped":
            x = x.unflatten(1, (case.groups, -1))
        return plain_op, plain_case(case), (x, *others)
    if op not in _CODED:
        return op, case, call.arguments
    given = named_arguments(op, call)
    if op.startswith("attention.index_topk"):
        given |= {name: dense_index(case, given[name]) for name in ("q", "keys")}
        given["candidates_TB"] = None
        plain = replace(case, key_format=DENSE, candidate_blocks=0, publishes=False)
    else:
        given["entries"] = dense_cache(case.entry_format, given["entries"])
        if "ring" in given:
            given["ring"] = dense_cache(case.window_format, given["ring"])
        plain = replace(case, window_format=DENSE, entry_format=DENSE, lse=False)
    return op, plain, tuple(given.values())


def _linear(case: Any) -> Fp8BlockCase:
    return Fp8BlockCase(case.rows, case.columns, case.block, case.dtype)


def _grouped(case: Any) -> GroupedCase:
    return GroupedCase(case.groups, case.rows, case.columns, "fp8_block", case.block, case.dtype)


def _experts(case: Any) -> ExpertsCase:
    shape = case.experts, case.selected, case.width, case.inner, case.limit
    return ExpertsCase(*shape, case.weight_format, case.block, case.dtype)


_OF_ROWS: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "linear.fp8_rows": ("linear.fp8_block", _linear),
        "linear.grouped_fp8_rows": ("linear.grouped", _grouped),
        "moe.experts_fp8_rows": ("moe.experts", _experts),
    }
)
"""What does the same with rows of plain numbers, and its case."""

_CODED = (
    "attention.sparse_prefill",
    "attention.sparse_decode",
    "attention.index_topk",
    "attention.index_topk_decode",
)
