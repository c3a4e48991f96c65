"""Contract of bringing weights near before they are read."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import Cost, Load, Op, Tolerance


@dataclass(frozen=True, slots=True)
class PrefetchCase:
    """Attributes:
    size: N, bytes of the weight.
    taken: how many of them are asked for at most, in pieces that lie evenly in the weight: each
        part of the product that reads it finds an equal share.
    dtype: of that product; nothing is computed here.
    """

    size: int
    taken: int
    dtype: str = "bfloat16"


def _cost(case: PrefetchCase, load: Load) -> Cost:
    return Cost(flops=0, bytes=min(case.size, case.taken))


PREFETCH = Op(
    name="weights.prefetch",
    doc="""Ask for a weight that will be read soon, so that it comes into the last cache before
    memory while others compute. No number changes, and nothing waits for what was asked for: a
    backend may do nothing at all. The reference does nothing.

    Arguments:
        weight_N: uint8 [N], dense, at a multiple of 16 bytes.

    Returns:
        Nothing: ().
    """,
    cases={},
    small_cases=(
        PrefetchCase(3 * 4096, 3 * 4096),
        PrefetchCase(9 * 4096 + 48, 5 * 4096 + 17),
        PrefetchCase(64, 64),
        PrefetchCase(2 * 4096, 0),
    ),
    cost=_cost,
    tolerance=Tolerance(float32=0.0, bfloat16=0.0),
)

OPS = (PREFETCH,)
