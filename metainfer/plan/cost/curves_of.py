"""What curves say of links."""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.hardware.curves import Curve
from metainfer.plan.cost.rates import origin_of


def largest_rate(curves: Sequence[Curve], means: Sequence[str]) -> tuple[float, str] | None:
    """Bytes a second of the largest copy between two GPUs, and its origin: of the first of `means`
    that was recorded, alone where it was. Of several pairs the fastest: narrower ways are told
    apart by the tree."""
    for kind in means:
        copies = [c for c in curves if c.means == kind and c.operation == "copy"]
        alone = [c for c in copies if not c.at_once] or copies
        rates = [(c.bytes[-1] / c.seconds[-1], origin_of(c.source)) for c in alone]
        if rates:
            return max(rates)
    return None
