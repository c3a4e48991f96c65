"""The constants of the cost model: few, physical, each with its source, in one data file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer.core.errors import UserError

_FILE = Path(__file__).parent / "constants.json"

MEASURED, PUBLISHED, INFERRED, DOUBTFUL = "measured", "published", "inferred", "doubtful"
"""What an input rests on. Doubtful: inferred of one machine alone, others of its kind differ."""


@dataclass(frozen=True, slots=True)
class Instead:
    """Attributes:
    work: that runs in place of another.
    but_on: architectures that have kernels for the other.
    """

    work: str
    but_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """How an engine uses a machine.

    Attributes:
        name, meaning: what it stands for.
        rates: factors on rates, by kind of work.
        passes: how often small operations go over their bytes; 1 where they are fused.
        ramp: factor on what a kernel takes beside its bytes and operations.
        step_us, chunk_us: of the host for a decode step and a chunk of a prompt.
        layer_us: of the host for a layer of a decode step, where graphs leave kernels out.
        launch_us: of the host for starting the kernels of a layer of a chunk, which runs under what
            is started; 0 where that never takes longer.
        composed: by kind of work of prompts that is composed of operations, each of which reads
            and writes all that lies between: passes over it in memory.
        splits_queries: each rank of a group scores the index keys for its share of a prompt's
            rows, and ranks gather what they chose.
        memory_share: of a card, that the engine takes at most.
        multiplied: work that runs as another, for want of kernels.
    """

    name: str
    meaning: str
    rates: Mapping[str, float]
    passes: float
    ramp: float
    step_us: float
    chunk_us: float
    collectives: tuple[str, ...]
    exact_wire: bool
    shards_tokens: bool
    replays: bool
    hidden: float
    layer_us: float = 0.0
    launch_us: float = 0.0
    composed: Mapping[str, float] = field(default_factory=dict)
    splits_queries: bool = False
    memory_share: float = 1.0
    multiplied: Mapping[str, Instead] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A constant that published figures set.

    Attributes:
        path: keys in the data file, one in the other.
        start: what it would be without those figures.
        low, high: what is physical.
        meaning: of the bounds.
    """

    path: tuple[str, ...]
    start: float
    low: float
    high: float
    meaning: str

    @property
    def name(self) -> str:
        return " ".join(self.path[1:])


@dataclass(frozen=True, slots=True)
class Constants:
    """Attributes:
    uncertainty: of an input, by its origin.
    efficiency: by architecture ("sm_120") and kind of work, share of the nominal rate.
    peak: by architecture and format, operations of a multiprocessor a clock.
    kernels, transfers: values by name.
    profiles: engines by name.
    calibrated: those that published figures set.
    """

    uncertainty: Mapping[str, float]
    efficiency: Mapping[str, Mapping[str, float]]
    peak: Mapping[str, Mapping[str, float]]
    kernels: Mapping[str, Any]
    transfers: Mapping[str, Any]
    profiles: Mapping[str, Profile]
    calibrated: tuple[Calibrated, ...] = ()

    def profile(self, name: str) -> Profile:
        if name not in self.profiles:
            raise UserError(
                f"there is no engine profile '{name}'", hint="profiles: " + ", ".join(self.profiles)
            )
        return self.profiles[name]

    def transfer(self, name: str) -> float:
        value: float = self.transfers[name]
        return value

    def kernel(self, name: str) -> float:
        value: float = self.kernels[name]
        return value


def read_constants(changed: Mapping[tuple[str, ...], float] | None = None) -> Constants:
    """Those of the data file.

    Args:
        changed: values in place of calibrated ones, by path.
    """
    given = json.loads(_FILE.read_text(encoding="utf-8"))
    for path, value in (changed or {}).items():
        _place(given, path)[path[-1]] = value
    return Constants(
        uncertainty=_values(given["uncertainty"]),
        efficiency={arch: _numbers(row) for arch, row in given["efficiency"].items()},
        peak={arch: _numbers(row) for arch, row in given["peak"].items() if isinstance(row, dict)},
        kernels=_values(given["kernels"]),
        transfers=_values(given["transfers"]),
        profiles={name: _profile(given["profiles"], name) for name in given["profiles"]},
        calibrated=tuple(
            Calibrated(**{**row, "path": tuple(row["path"])}) for row in given["calibrated"]
        ),
    )


def calibrated_values() -> dict[tuple[str, ...], float]:
    """Values of the calibrated constants as they ship, by path."""
    given = json.loads(_FILE.read_text(encoding="utf-8"))
    paths = (tuple(row["path"]) for row in given["calibrated"])
    return {path: float(_place(given, path)[path[-1]]) for path in paths}


def _place(given: Any, path: Sequence[str]) -> Any:
    for key in path[:-1]:
        given = given[key]
    return given


def _values(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: row["value"] for name, row in rows.items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if not isinstance(value, str)}


def _profile(rows: Mapping[str, Mapping[str, Any]], name: str) -> Profile:
    """What a profile leaves out is as in the one that it is `like`; rates are replaced one by
    one."""
    row = rows[name]
    base = rows[row["like"]] if "like" in row else {}
    given = {**base, **row, "rates": {**base.get("rates", {}), **row.get("rates", {})}}
    given = {key: value for key, value in given.items() if key not in ("source", "like")}
    given["collectives"] = tuple(given["collectives"])
    given["multiplied"] = {
        work: Instead(other[0], tuple(other[1:]))
        for work, other in given.get("multiplied", {}).items()
    }
    return Profile(name=name, **given)
