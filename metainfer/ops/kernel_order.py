"""Kernel orders: which backends may run an op, in order of preference, as a user writes them.

"op=backend,backend;op=..." with "*" for all ops that are not named.
"""

from __future__ import annotations

from collections.abc import Mapping

from metainfer.core.errors import UserError

ALL_OPS = "*"
REFERENCE = "reference"
"""The slow, plain implementation that every op has."""
COMPOSED = "composed"
"""What an eager framework composes of torch's own operations; runs only where it is named."""
OPEN = "open"
"""A kernel of another project that is installed; runs only where it is named."""
NO_KERNEL = "has no kernel for it"
"""Why a backend that is named does not run an op that it lacks."""


def parse_order(
    order: str, backends: Mapping[str, tuple[str, ...]]
) -> Mapping[str, tuple[str, ...]]:
    """Backends by op or "*".

    Args:
        backends: all that there are, by op.

    Raises:
        UserError: naming the unknown op or backend, or the op that is listed twice or as nothing.
    """
    orders: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in order.split(";"))):
        op, _, listed = part.partition("=")
        op = op.strip()
        if op != ALL_OPS and op not in backends:
            raise UserError(
                f"the kernel order names the unknown op {op}",
                hint="ops are: " + ", ".join(backends),
            )
        names = tuple(name.strip() for name in listed.split(",") if name.strip())
        known = {name for by in backends.values() for name in by}
        known = known if op == ALL_OPS else set(backends[op])
        for name in names:
            if name not in known:
                raise UserError(
                    f"the kernel order names the unknown backend {name} for {op}",
                    hint="backends there are: " + ", ".join(sorted(known)),
                )
        if not names or op in orders:
            raise UserError(
                f"the kernel order must list backends of {op} once",
                hint=f"write them behind one another, such as '{op}={','.join(sorted(known)[:2])}'",
            )
        orders[op] = names
    return orders


def allowed(
    op: str, orders: Mapping[str, tuple[str, ...]], default: tuple[str, ...]
) -> tuple[str, ...]:
    """The backends that may run `op`, best first."""
    return orders.get(op, orders.get(ALL_OPS, default))
