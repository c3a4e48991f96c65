"""What curves say of links."""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.hardware.curves import Curve
from metainfer.plan.cost.rates import origin_of


def largest_rate(
    curves: Sequence[Curve], means: Sequence[str], operation: str = "copy", ranks: int = 2
) -> tuple[float, str] | None:
    """Bytes a second of the largest transfer, and its origin: of the first of `means` that was
    recorded, alone where it was. Of several the fastest: narrower ways are told apart by the tree.
    """
    for kind in means:
        copies = [
            c
            for c in curves
            if c.means == kind and c.operation == operation and len(c.gpus) == ranks
        ]
        alone = [c for c in copies if not c.at_once] or copies
        rates = [(c.bytes[-1] / c.seconds[-1], origin_of(c.source)) for c in alone]
        if rates:
            return max(rates)
    return None
