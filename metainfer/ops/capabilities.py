"""Capabilities: what the kernels can do on a target, as the planner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from metainfer.ops.base import Target
from metainfer.ops.kernel_order import allowed, parse_order


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What may run on one target. A plain record: the planner never imports a kernel.

    Attributes:
        target: what the record is about.
        backends: for each op the backends that may run there, best first.
        default_order: the order that is used when the plan says nothing.
        order_of: by op, where it is another.
        expanding: backends that turn quantised weights into the compute dtype at load: faster
            where few rows share a weight, at 2 to 8 times the memory of the quantised weights.
            They are never chosen unless the plan names them.
    """

    target: Target
    backends: Mapping[str, tuple[str, ...]]
    default_order: tuple[str, ...]
    expanding: frozenset[str]
    order_of: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def default_order_of(self, op: str) -> tuple[str, ...]:
        """The order that is used for `op` when the plan says nothing."""
        return self.order_of.get(op, self.default_order)

    def backend_of(self, op: str, order: str = "") -> str | None:
        """The backend that `order` puts first for `op`, of those that may run on the target; None
        where it has none. Single cases may be refused and fall to the next."""
        orders = parse_order(order, self.backends)
        names = allowed(op, orders, self.default_order_of(op))
        return next((name for name in names if name in self.backends.get(op, ())), None)
