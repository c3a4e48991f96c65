"""Kinds of card that kernels are written and compiled for, whether or not one is here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from metainfer.core.errors import UserError
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

PORTABLE: tuple[tuple[int, int], ...] = ((8, 0), (8, 9))
"""Capabilities whose code runs on newer GPUs, from its PTX; that of newer ones ("sm_90a") runs on
those alone."""

_NAME = re.compile(r"sm_(\d+)(\d)")


def parse_capability(name: str) -> tuple[int, int]:
    """ "sm_89" -> (8, 9). Raises UserError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"'{name}' is no GPU's code name", hint="they look like sm_89")
    return int(match[1]), int(match[2])


def parse_portable(name: str) -> tuple[int, int]:
    """The capability of code that newer GPUs run. Raises UserError."""
    capability = parse_capability(name)
    check_portable(capability)
    return capability


def check_portable(capability: tuple[int, int]) -> None:
    """Raises UserError: no newer GPU runs this code."""
    if capability not in PORTABLE:
        raise UserError(
            f"no code for sm_{capability[0]}{capability[1]} runs on other GPUs",
            hint="take " + " or ".join(f"sm_{major}{minor}" for major, minor in PORTABLE),
        )
