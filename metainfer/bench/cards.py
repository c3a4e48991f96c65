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

from metainfer.hardware.cards import card_named
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


_WORK = {"bfloat16": "product bf16", "fp8": "plain product fp8"}
"""What a plain product with operands of a format is called among the rates of a card."""


def _card(name: str) -> Card:
    """From what is published of it; operands without a rate are left out."""
    known = card_named(name)
    rates = {operands: rate for operands, work in _WORK.items() if (rate := known.rate(work))}
    return Card(
        name,
        known.memory_bytes_per_s,
        MappingProxyType({operands: rate.per_s for operands, rate in rates.items()}),
        "; ".join(f"{operands}: {rate.source}" for operands, rate in rates.items()),
    )


CARDS: tuple[Card, ...] = (_card("RTX 6000D"), _card("L40S"))


def projected_s(card: Card, cost: Cost, operands: str, fraction: float) -> float:
    """Seconds on `card` if its code reaches the same fraction of the floor there."""
    wide = "bfloat16" if operands == "float32" else operands
    return card.rates().floor_s(cost, wide) / fraction
