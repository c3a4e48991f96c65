"""Cards that are not at hand: what they reach in plain work, to project times from counts.

A projected time is the floor of the operation on that card, max(bytes / bandwidth, operations /
rate), divided by the fraction of its floor that the card's own code (sm_89) reached on the GPU at
hand. There the floor is counted with the rate of the best mma.sync product, since that is the
instruction which the code and the cards share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from metainfer.ops.base import Cost
from metainfer.ops.floor import Rates

_COPY_SHARE = 0.9
"""Of the memory's nominal rate that a copy reaches: 4.3 of 4.8 TB/s on the H200."""


@dataclass(frozen=True, slots=True)
class Card:
    """Attributes:
    nominal_bytes_per_s: of its memory.
    flops_per_s: of large plain products as measured on such a card, by format of the operands.
    source: where the figures are from.
    """

    name: str
    nominal_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def rates(self) -> Rates:
        return Rates(_COPY_SHARE * self.nominal_bytes_per_s, self.flops_per_s, 0.0)


CARDS: tuple[Card, ...] = (
    Card(
        "RTX 6000D",
        1.57e12,
        MappingProxyType({"bfloat16": 143e12, "fp8": 286e12}),
        "memory: 448 of the RTX PRO 6000's 512 bits at its 1.79 TB/s; bf16: torch's product"
        " of 8,192 and 10,240 cubed, one report (github.com/zzc0721/torch-performance-test-data,"
        " issue 158; short ones of 2,048 cubed reach 241); fp8: taken as twice bf16, not measured",
    ),
    Card(
        "L40S",
        0.864e12,
        MappingProxyType({"bfloat16": 285e12, "fp8": 437e12}),
        "memory and best products in AIConfigurator's tables of measured operations"
        " (nominal: 362 and 733 TFLOP/s)",
    ),
)


def projected_s(card: Card, cost: Cost, operands: str, fraction: float) -> float:
    """Seconds on `card` if its code reaches the same fraction of the floor there."""
    wide = "bfloat16" if operands == "float32" else operands
    return card.rates().floor_s(cost, wide) / fraction
