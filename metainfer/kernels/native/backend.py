"""What the modules of this package share: the library, and how a backend over it is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from metainfer.core.errors import MetainferError
from metainfer.kernels.cpu.backend import on_cpu
from metainfer.kernels.native.library import Library
from metainfer.kernels.registry import Backend, Verdict, no
from metainfer.ops.base import Target

FEW_ROWS = 16
"""Steps of more rows go to torch, which uses all cores."""

MOST_ELEMENTS = 2**20
"""Of a matrix, or of what is read for one row: one thread takes about 0.2 ms for so many."""

Eligible = Callable[[Any, Target], Verdict]


@dataclass(frozen=True, slots=True)
class Native:
    """The library, or why there is none."""

    library: Library | str

    def backend(
        self,
        op: str,
        run: Callable[..., Any],
        prepare: Callable[..., Any] | None = None,
        eligible: Eligible = on_cpu,
    ) -> Backend:
        """The backend of `op` that runs `run(library, case, *arguments)`; weights are prepared so
        that `kernels.cpu` can run from them too."""
        if isinstance(self.library, str):
            reason = self.library
            return Backend(op, "native", _missing, lambda case, target: no(reason), prepare)
        ours = partial(run, self.library)
        return Backend(op, "native", ours, eligible, prepare, holds={"cpu": lambda held: held})


def _missing(*arguments: Any) -> Any:
    raise MetainferError("a kernel without its library was run")


def small(elements: Callable[[Any], int]) -> Eligible:
    """Serves cases of up to MOST_ELEMENTS on the CPU."""

    def eligible(case: Any, target: Target) -> Verdict:
        if elements(case) > MOST_ELEMENTS:
            return no(f"{elements(case)} elements are work for more than one thread")
        return on_cpu(case, target)

    return eligible


def is_bf16(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bfloat16


def require(out_of_memory: int) -> None:
    if out_of_memory:
        raise MemoryError("a kernel found no memory for its temporaries")
