"""The generic path of an operation, `kernels.composed`, as a side of `bench ops`.

It knows caches of plain numbers alone: coded ones are decoded beforehand, and candidates of blocks
are ignored. Where there is no composition the reference stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from metainfer.bench.ops_arguments import DENSE, dense_cache, dense_index, named_arguments
from metainfer.kernels.composed import BACKENDS as COMPOSED
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.timing import Timed
from metainfer.ops.catalogue import OPS

Side = Callable[[Any, Call], Timed]


def generic_side(op: str) -> Side:
    """What prepares the generic path of an operation."""
    return partial(_side, op)


def _side(op: str, case: Any, call: Call) -> Timed:
    case, arguments = _plain(op, case, call)
    backend = next(backend for backend in (*COMPOSED, *REFERENCES) if backend.op == op)
    if OPS[op].weights:
        prepare = backend.prepare
        arguments = (prepare(case, *call.weights) if prepare else call.weights, *arguments)
    return partial(backend.run, case, *arguments)


def _plain(op: str, case: Any, call: Call) -> tuple[Any, tuple[Any, ...]]:
    """Case and arguments with plain numbers in place of codes."""
    if op not in _CODED:
        return case, call.arguments
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
    return plain, tuple(given.values())


_CODED = (
    "attention.sparse_prefill",
    "attention.sparse_decode",
    "attention.index_topk",
    "attention.index_topk_decode",
)
