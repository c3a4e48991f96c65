"""Capabilities: what the kernels can do on a target, as the planner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metainfer.ops.base import Target


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What may run on one target. A plain record: the planner never imports a kernel.

    Attributes:
        target: what the record is about.
        backends: for each op the backends that may run there, best first.
        default_order: the order that is used when the plan says nothing.
        expanding: backends that turn quantised weights into the compute dtype at load: faster
            where few rows share a weight, at 2 to 8 times the memory of the quantised weights.
            They are never chosen unless the plan names them.
    """

    target: Target
    backends: Mapping[str, tuple[str, ...]]
    default_order: tuple[str, ...]
    expanding: frozenset[str]

    def covered(self, op: str) -> bool:
        """Whether `op` runs on the target without naming a backend."""
        return any(name in self.backends.get(op, ()) for name in self.default_order)
