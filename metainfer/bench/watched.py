"""A registry whose kernels are run by somebody who watches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from metainfer.kernels.registry import Kernel, Registry
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS


class Watcher(Protocol):
    def run(self, kernel: Kernel, *arguments: Any) -> Any:
        """What `kernel` returns for these arguments."""


class Watched(Registry):
    """The same backends, whose kernels a watcher runs."""

    def __init__(self, registry: Registry, watcher: Watcher) -> None:
        backends = (backend for op in OPS for backend in registry.backends(op).values())
        super().__init__(backends, registry.tuned)
        self._watcher = watcher

    def bind(self, op: str, case: Any, target: Target, order: str = "") -> Kernel:
        kernel = super().bind(op, case, target, order)
        return replace(kernel, run=partial(self._watcher.run, kernel))
