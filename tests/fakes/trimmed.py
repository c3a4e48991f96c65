"""Backends that cut lists to what they hold before they run, so that room in them changes no bit.

The sums of kernels for the CPU go over all columns of a list; how they are divided depends on how
many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.registry import Backend, Registry
from metainfer.ops.catalogue import OPS

# Which argument behind the case is a list of each row, and whether there may be none of it.
_LISTS = {"attention.sparse_decode": 5, "attention.index_topk_decode": 3}


def trimming_registry(wrap: Callable[[Backend], Backend] = lambda backend: backend) -> Registry:
    """All backends of this package, each through `wrap`."""
    registry = builtin_registry()
    return Registry(wrap(trimmed(b)) for op in OPS for b in registry.backends(op).values())


def trimmed(backend: Backend) -> Backend:
    place = _LISTS.get(backend.op)
    if place is None:
        return backend
    return replace(backend, run=partial(_run, backend.run, place))


def _run(run: Callable[..., Any], place: int, case: Any, *arguments: Any) -> Any:
    rows_TE = arguments[place]
    if rows_TE is None:
        return run(case, *arguments)
    width = int((rows_TE >= 0).sum(1).max())
    assert torch.equal(rows_TE[:, width:], torch.full_like(rows_TE[:, width:], -1))
    cut = [*arguments]
    cut[place] = rows_TE[:, :width].contiguous()
    if place == 5 and width == 0:
        cut[4] = cut[5] = None
    return run(case, *cut)
