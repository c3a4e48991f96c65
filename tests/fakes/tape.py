"""A stand-in for CUDA graphs on the CPU: it notes every operation on tensors while work runs, and
does them again on the same tensors.

As in a graph, whatever Python computed meanwhile is baked in: shapes, numbers, which operation came
next. What reads a tensor on the host is refused. Kernels of this package are single operations,
however they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from metainfer.kernels.registry import Backend

Redo = Callable[[], None]

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


class Tape(TorchDispatchMode):
    """Notes what is done while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Redo] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert not name.startswith(_READS), f"{name} reads a tensor on the host"
        made = func(*args, **kwargs)
        self.note(lambda: func(*args, **kwargs), made, (args, kwargs))
        return made

    def note(self, again: Callable[[], Any], made: Any, inputs: Any) -> None:
        """`again` gives what goes to where `made` is, unless that is memory of the inputs."""
        known = {_memory(tensor) for tensor in _tensors(inputs)}
        outputs = _tensors(made)

        def redo() -> None:
            for old, new in zip(outputs, _tensors(again()), strict=True):
                if _memory(old) not in known:
                    old.copy_(new)

        self.done.append(redo)


class TapeGraphs:
    """Graphs for `llm.graphs.DecodeSteps`, of work whose kernels come from `opaque` backends."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.replays = 0
        self._tape: Tape | None = None

    def capture(self, work: Redo) -> Redo:
        self._tape = tape = Tape()
        with tape:
            work()
        self._tape = None
        self.lengths.append(len(tape.done))

        def replay() -> None:
            self.replays += 1
            for redo in tape.done:
                redo()

        return replay

    def opaque(self, backend: Backend) -> Backend:
        """`backend` as a single operation of the tapes."""

        def run(*arguments: Any) -> Any:
            tape = self._tape
            if tape is None:
                return backend.run(*arguments)
            with torch.utils._python_dispatch._disable_current_modes():
                made = backend.run(*arguments)
            tape.note(lambda: backend.run(*arguments), made, arguments)
            return made

        return replace(backend, run=run)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
