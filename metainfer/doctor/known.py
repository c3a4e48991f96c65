"""Known: records of doctor/data, which say what others found out, each with its source."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine, gpus_of

_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Cards:
    """Which machines a record is about.

    Attributes:
        capabilities: such as "12.0"; () for all.
        count: cards at least.
    """

    capabilities: tuple[str, ...]
    count: int

    def among(self, machine: Machine) -> bool:
        """Whether the machine has as many cards, of one of these kinds."""
        gpus = gpus_of(machine)
        kinds = {f"{gpu.capability[0]}.{gpu.capability[1]}" for gpu in gpus}
        known = not self.capabilities or bool(kinds & set(self.capabilities))
        return known and len(gpus) >= self.count


@dataclass(frozen=True, slots=True)
class Versions:
    """One condition on a version.

    Attributes:
        names: of packages, "driver" or "cuda"; the first that is there counts.
        one_of: versions; () for a range.
        least, below: bounds of a range, "" for none.
    """

    names: tuple[str, ...]
    one_of: tuple[str, ...]
    least: str
    below: str

    def holding(self, machine: Machine) -> str:
        """The name and version that this holds of; "" where it does not or nothing is there."""
        there = versions_of(machine)
        name = next((name for name in self.names if name in there), "")
        if not name:
            return ""
        version = there[name]
        found = version in self.one_of if self.one_of else self._in_range(version)
        return f"{name} {version}" if found else ""

    def _in_range(self, version: str) -> bool:
        numbers = parts(version)
        above = not self.least or numbers >= parts(self.least)
        return above and (not self.below or numbers < parts(self.below))


@dataclass(frozen=True, slots=True)
class Pair:
    """Versions that are bad together. Texts as of a finding."""

    name: str
    level: str
    cards: Cards
    when: tuple[Versions, ...]
    matters: str
    fix: str
    source: str


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a kind of card with a family of models.

    Attributes:
        families: of models; () for all, and for none.
        heads: of attention on one rank, of some layout that there are cards for; () for any.
        flag: of another engine, which it takes without effect; "" where the note is of none.
    """

    check: str
    level: str
    cards: Cards
    families: tuple[str, ...]
    heads: tuple[int, ...]
    what: str
    evidence: str
    matters: str
    fix: str
    source: str
    flag: str = ""


def parts(version: str) -> tuple[int, ...]:
    """ "2.11.0+cu130" -> (2, 11, 0): its numbers, without what a builder added."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def versions_of(machine: Machine) -> dict[str, str]:
    """Of packages as recorded, of the driver, and of CUDA as torch's own version tells it."""
    found = dict(machine.versions)
    if not isinstance(machine.driver, Unknown):
        found["driver"] = machine.driver
    built = re.search(r"\+cu(\d+)(\d)$", found.get("torch", ""))
    if built is not None:
        found["cuda"] = f"{built[1]}.{built[2]}"
    return found


def read_pairs() -> tuple[Pair, ...]:
    return tuple(
        Pair(
            row["name"],
            row["level"],
            _cards(row),
            tuple(
                Versions(tuple(one["names"]), tuple(one.get("is", ())), one.get("from", ""),
                         one.get("below", ""))
                for one in row["when"]
            ),
            row["matters"],
            row["fix"],
            row["source"],
        )
        for row in _read("versions.toml")["pair"]
    )  # fmt: skip


def read_notes() -> tuple[Note, ...]:
    return tuple(
        Note(
            row["check"],
            row["level"],
            _cards(row),
            tuple(row.get("families", ())),
            tuple(row.get("heads", ())),
            row["what"],
            row["evidence"],
            row.get("matters", ""),
            row.get("fix", ""),
            row["source"],
            row.get("flag", ""),
        )
        for row in _read("notes.toml")["note"]
    )


def _cards(row: Mapping[str, Any]) -> Cards:
    return Cards(tuple(row.get("capabilities", ())), row.get("cards", 1))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / name).read_text(encoding="utf-8"))
