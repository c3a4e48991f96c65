"""Kinds of card that kernels are written and compiled for, whether or not one is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from metainfer.ops.base import Target


@dataclass(frozen=True, slots=True)
class CardKind:
    """Attributes:
    capability: compute capability.
    multiprocessors: of the card that stands for its kind: how work is split depends on it.
    card: which card that is.
    """

    capability: tuple[int, int]
    multiprocessors: int
    card: str

    @property
    def target(self) -> Target:
        return Target("cuda", self.capability)


CARD_KINDS: Mapping[str, CardKind] = MappingProxyType(
    {
        "sm_80": CardKind((8, 0), 108, "A100"),
        "sm_86": CardKind((8, 6), 84, "RTX A6000"),
        "sm_89": CardKind((8, 9), 142, "L40S"),
        "sm_90": CardKind((9, 0), 132, "H200"),
        "sm_100": CardKind((10, 0), 148, "B200"),
        "sm_120": CardKind((12, 0), 188, "RTX PRO 6000"),
    }
)
"""By the name that compilers give it."""
