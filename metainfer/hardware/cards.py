"""Cards: what is published of cards by name, in cards.json, the one place for such figures.

Nominal figures are of data sheets, rates were reached on such cards; sources are beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metainfer.hardware.curves import Rate
from metainfer.hardware.facts import Unknown, record_of
from metainfer.hardware.machine import Gpu, Source

_FILE = Path(__file__).parent / "cards.json"
_MEMORY_SHARE = 0.08
"""By which the memory that a driver tells may differ: ECC takes a sixteenth, drivers some more."""


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of card.

    Attributes:
        name: short, such as "L40S".
        pattern: of the names by which drivers call it, to be searched for.
        capability: compute capability.
        multiprocessors: SMs.
        shared_block_bytes: shared memory that one block may use.
        memory_bytes: as the driver tells it.
        memory_bytes_per_s: nominal.
        operations_per_s: nominal of dense products, a multiplication and an addition counted two,
            by format of the operands: "bf16", "fp8", "fp4".
        rates: reached on such cards, or inferred where the source of the rate says so.
        power_w: limit that it comes with.
        pcie_generation: most that it does, over 16 lanes.
        nvlink_bytes_per_s: one direction, of all links of a card; 0 without.
        p2p: whether the driver as shipped lets such cards reach each other's memory.
        p2p_why: the driver's reason where not; what to know where it does.
        price: of one card, in US dollars.
        sources: of the fields.
    """

    name: str
    pattern: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_block_bytes: int
    memory_bytes: int
    memory_bytes_per_s: float
    operations_per_s: Mapping[str, float]
    rates: tuple[Rate, ...]
    power_w: float
    pcie_generation: int
    nvlink_bytes_per_s: float
    p2p: bool
    p2p_why: str
    price: float | Unknown
    sources: tuple[Source, ...]

    def rate(self, work: str) -> Rate | None:
        """The one of the most rows for a kind of work; None where nothing is published."""
        found = [rate for rate in self.rates if rate.work == work]
        return max(found, key=lambda rate: rate.rows) if found else None


@cache
def all_cards() -> tuple[Card, ...]:
    """In the order of the file."""
    found = json.loads(_FILE.read_text(encoding="utf-8"))["cards"]
    return tuple(record_of(Card, card, f"{card.get('name', '?')}: ") for card in found)


def card_of(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int | Unknown | None = None,
    memory_bytes: int | None = None,
) -> Card | None:
    """The card that a driver calls so; None where none is known, or where SMs or memory are others
    than its own, as of a part of a card (MIG) or one with more memory soldered on."""
    for card in all_cards():
        if card.capability != capability or re.search(card.pattern, name) is None:
            continue
        if isinstance(multiprocessors, int) and multiprocessors != card.multiprocessors:
            continue
        off = 0 if memory_bytes is None else abs(memory_bytes / card.memory_bytes - 1)
        if off <= _MEMORY_SHARE:
            return card
    return None


def card_of_gpu(gpu: Gpu) -> Card | None:
    """`card_of` with all that is known of a GPU."""
    return card_of(gpu.name, gpu.capability, gpu.multiprocessors, gpu.memory_bytes)


def card_named(name: str) -> Card:
    """By its short name. Raises KeyError."""
    return {card.name: card for card in all_cards()}[name]
