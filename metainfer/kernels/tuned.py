"""Tuned: what `metainfer kernels tune` measured on this card, and what the registry makes of it.

Candidates are backends, and variants of one, written "backend:variant". For each operation and
case their times are known at a few numbers of rows; a call of other rows goes by the next larger
of these. Those that once gave wrong results are never bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from metainfer.core.units import format_count
from metainfer.ops.base import Target, case_fields

Key = tuple[str, str]  # (op, case as JSON)

DEFAULT = "default order"
NOT_TUNED = "not tuned on this card"
WORTH = 0.97
"""Share of the default's time that another candidate must not exceed: less is noise."""


def key_of(op: str, case: Any) -> Key:
    return op, case_text(case_fields(case))


def case_text(case: Mapping[str, Any]) -> str:
    """A case, or what JSON made of one, as a key."""
    return json.dumps(case, sort_keys=True)


def backend_of(candidate: str) -> str:
    """ "triton:low" -> "triton"."""
    return candidate.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call of so many rows, by candidate."""

    rows: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of an operation at a case.

    Attributes:
        timings: by rising numbers of rows.
        bad: by candidate, why it is never bound.
    """

    timings: tuple[Timing, ...]
    bad: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Part:
    """What runs calls of up to `most_rows` rows; of any number where that is None."""

    candidate: str
    most_rows: int | None = None


def at_rows(parts: Sequence[Part], rows: int) -> str:
    """The candidate that runs a call of so many rows."""
    return next(p.candidate for p in parts if p.most_rows is None or rows <= p.most_rows)


@dataclass(frozen=True, slots=True)
class Choice:
    """Attributes:
    parts: by rising numbers of rows; one where the same runs all.
    why: a few words that say who chose, and by which times.
    holder: the backend that prepares weights; "" for the one that runs most rows.
    """

    parts: tuple[Part, ...]
    why: str
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What counts for one target: this card, these versions. Immutable.

    Attributes:
        target: None: for nothing.
        unused: by key, why what was measured elsewhere does not count here.
        note: why nothing is known of any other; "" where that is nothing to tell.
    """

    target: Target | None = None
    measured: Mapping[Key, Measured] = field(default_factory=lambda: MappingProxyType({}))
    unused: Mapping[Key, str] = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""

    def of(self, op: str, case: Any, target: Target) -> Measured | None:
        if not self.measured or target != self.target:
            return None
        return self.measured.get(key_of(op, case))

    def bad(self, op: str, case: Any, target: Target) -> Mapping[str, str]:
        """By candidate, why it is never bound."""
        found = self.of(op, case, target)
        return {} if found is None else found.bad

    def why_not(self, op: str, case: Any, target: Target) -> str:
        """Says that the default order holds, and why."""
        why = self.note
        if target == self.target and self.unused:
            why = self.unused.get(key_of(op, case), why)
        return f"{DEFAULT}: {why}" if why else DEFAULT


UNTUNED = Tuned()


def choose(
    found: Measured, serving: Sequence[str], runs_from: Callable[[str], Collection[str]]
) -> Choice | None:
    """The fastest candidate for each number of rows that was measured.

    Args:
        serving: backends that may run it, the default first.
        runs_from: by backend, those that can run from the weights as it prepares them: weights are
            kept once.

    Returns None where the default was not measured.
    """
    default = serving[0]
    if not all(default in timing.seconds for timing in found.timings) or not found.timings:
        return None
    best: tuple[float, str, tuple[str, ...]] | None = None
    for holder in serving:
        usable = runs_from(holder)
        picked = tuple(_pick(timing, found.bad, serving, usable) for timing in found.timings)
        if not all(picked):
            continue
        cost = sum(
            timing.seconds[name] / timing.seconds[default]
            for timing, name in zip(found.timings, picked, strict=True)
        )
        if best is None or cost < WORTH * best[0]:
            best = cost, holder, picked
    if best is None:
        return None
    _, holder, picked = best
    names = dict.fromkeys(map(backend_of, reversed(picked)))
    holder = next((name for name in names if names.keys() <= set(runs_from(name))), holder)
    return Choice(_merged(found.timings, picked), _told(found, picked, default), holder)


def _pick(
    timing: Timing, bad: Mapping[str, str], serving: Sequence[str], usable: Collection[str]
) -> str:
    """The fastest that may run; the first in order where others gain next to nothing. "" for
    none."""
    names = [
        name
        for name in timing.seconds
        if name not in bad and backend_of(name) in serving and backend_of(name) in usable
    ]
    if not names:
        return ""
    fastest = min(names, key=lambda name: timing.seconds[name])
    first = next((name for name in serving if name in names), fastest)
    worth = timing.seconds[fastest] < WORTH * timing.seconds[first]
    return fastest if worth else first


def _merged(timings: Sequence[Timing], picked: Sequence[str]) -> tuple[Part, ...]:
    """Neighbours that the same runs are one part; the last has no end."""
    parts: list[Part] = []
    for timing, name in zip(timings, picked, strict=True):
        if parts and parts[-1].candidate == name:
            parts.pop()
        parts.append(Part(name, timing.rows))
    return (*parts[:-1], Part(parts[-1].candidate))


def _told(found: Measured, picked: Sequence[str], default: str) -> str:
    gains = [
        (timing.seconds[default] / timing.seconds[name], timing, name)
        for timing, name in zip(found.timings, picked, strict=True)
        if name != default
    ]
    if gains:
        _, timing, name = max(gains, key=lambda gain: gain[0])
        ours, others = format_time(timing.seconds[name]), format_time(timing.seconds[default])
        return f"tuned: {ours} against {others} at {told_rows(timing.rows)}"
    least = found.timings[0]
    alone = all(set(timing.seconds) <= {default} for timing in found.timings)
    took = f"{format_time(least.seconds[default])} at {told_rows(least.rows)}"
    return f"tuned: {took}, {'nothing else serves it' if alone else 'nothing is faster'}"


def told_rows(count: int) -> str:
    """ "1 row", "2,048 rows"."""
    return "1 row" if count == 1 else f"{format_count(count)} rows"


def format_time(seconds: float) -> str:
    """Three figures: "18.8 us", "2.41 ms"."""
    for size, unit in ((1e-3, "us"), (1.0, "ms")):
        if seconds < 0.9995 * size:
            number = seconds / size * 1e3
            return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"
    return f"{seconds:.2f} s"
