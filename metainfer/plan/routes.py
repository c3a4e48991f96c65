"""Routes: which way an operation of several ranks takes, by bytes and phase, and why.

Ways are compared by curves of time against bytes, measured (`plan.ways`) or foretold
(`plan.foretold`). The plan has what came of it, in words that all ranks are given: ranks that
decide on their own deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from metainfer.core.errors import MetainferError
from metainfer.core.units import format_bytes, format_seconds

DECODE, PREFILL = "decode", "prefill"
"""Phases: what graphs may hold, and all else."""

PHASES = (DECODE, PREFILL)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SUMS = ("all_reduce", "reduce_scatter")
"""Operations whose numbers travel in a wire."""

_GAIN = 0.05  # for which the way is changed as bytes grow
_WORDS = re.compile(r"(\w+)(?: in (\w+))?: (.+)")
_THEN = ", then "
_UP_TO = re.compile(r"(.+) to (\d+)")


@dataclass(frozen=True, slots=True)
class Rival:
    """A way, and how long it takes.

    Attributes:
        name: of the way.
        bytes, seconds: as many of each, bytes ascending.
        phases: in which it can be taken.
        ordered: sums are those in the order of ranks, bit for bit.
        why_not: why it cannot be taken at all; "" where it can.
    """

    name: str
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    phases: tuple[str, ...] = PHASES
    ordered: bool = True
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """Attributes:
    up_to: bytes to which `name` is taken; None for any.
    seconds: that it takes at the largest size compared; 0 where nothing was compared.
    second, second_s: the runner-up there, "" for none, and its time.
    """

    up_to: int | None
    name: str
    seconds: float = 0.0
    second: str = ""
    second_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """Of an operation in a phase.

    Attributes:
        steps: by rising bytes; the last has no bound.
        refused: (way, why it is not taken).
    """

    operation: str
    phase: str
    steps: tuple[Step, ...]
    refused: tuple[tuple[str, str], ...] = ()

    def choose(self, size: int) -> str:
        return next(s.name for s in self.steps if s.up_to is None or size <= s.up_to)

    def explain(self) -> list[str]:
        """Sentences."""
        lines = []
        for step in self.steps:
            where = "beyond that" if step.up_to is None else f"to {format_bytes(step.up_to)}"
            if step.up_to is None and len(self.steps) == 1:
                where = "at all sizes"
            rival = f", {step.second} {format_seconds(step.second_s)}" if step.second else ""
            lines.append(
                f"{self.operation} in {self.phase}, {where}: {step.name}"
                f" ({format_seconds(step.seconds)}{rival})"
            )
        lines += [f"{self.operation} in {self.phase}: not {n}: {why}" for n, why in self.refused]
        return lines


def route(operation: str, phase: str, rivals: Sequence[Rival]) -> Route:
    """The fastest at each size that all were measured at, of the ways whose sums are those in the
    order of ranks. The first of `rivals` wins a tie.

    Raises MetainferError: nothing can be taken.
    """
    refused = [(rival.name, rival.why_not) for rival in rivals if rival.why_not]
    left = []
    for rival in rivals:
        if rival.why_not:
            continue
        if phase not in rival.phases:
            refused.append((rival.name, f"cannot be taken in {phase}"))
        elif not rival.ordered:
            refused.append((rival.name, "its sums depend on how the work is divided"))
        elif rival.bytes:
            left.append(rival)
        else:
            refused.append((rival.name, "was not measured"))
    if not left:
        told = "; ".join(f"{name}: {why}" for name, why in refused)
        raise MetainferError(f"no way is left for {operation} in {phase} ({told})")
    return Route(operation, phase, _steps(left), tuple(refused))


def _steps(rivals: Sequence[Rival]) -> tuple[Step, ...]:
    sizes = sorted({size for rival in rivals for size in rival.bytes})
    steps: list[Step] = []
    for size in sizes:
        times = {r.name: s for r in rivals for b, s in zip(r.bytes, r.seconds, strict=True)
                 if b == size}  # fmt: skip
        order = sorted(times, key=lambda name: times[name])
        best = order[0]
        if steps and steps[-1].name in times:
            before = steps[-1].name
            if times[before] <= times[best] * (1 + _GAIN):
                best = before
        second = next((name for name in order if name != best), "")
        step = Step(size, best, times[best], second, times.get(second, 0.0))
        if steps and steps[-1].name == best:
            steps[-1] = step
        else:
            steps.append(step)
    last = steps[-1]
    steps[-1] = Step(None, last.name, last.seconds, last.second, last.second_s)
    return tuple(steps)


class Router:
    """All routes of a group.

    Attributes:
        routes: by (operation, phase).
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes: Mapping[tuple[str, str], Route] = MappingProxyType(
            {(route.operation, route.phase): route for route in routes}
        )

    def choose(self, operation: str, size: int, phase: str) -> str:
        found = self.routes.get((operation, phase))
        if found is None:
            raise MetainferError(f"there is no route for {operation} in {phase}")
        return found.choose(size)

    def explain(self) -> list[str]:
        return [line for route in self.routes.values() for line in route.explain()]

    def words(self) -> str:
        """Such as "all_reduce: one-shot to 65536, then two-shot; all_gather in decode: NCCL";
        phases with the same route are told together."""
        told: dict[tuple[str, str], list[str]] = {}
        for (operation, phase), found in self.routes.items():
            ways = _THEN.join(
                step.name if step.up_to is None else f"{step.name} to {step.up_to}"
                for step in found.steps
            )
            told.setdefault((operation, ways), []).append(phase)
        return "; ".join(
            f"{operation}: {ways}" if len(phases) == len(PHASES) else
            f"{operation} in {phases[0]}: {ways}"
            for (operation, ways), phases in told.items()
        )  # fmt: skip

    @classmethod
    def of_words(cls, words: str) -> Router:
        """What `words` gave, without times. Raises MetainferError where it did not give them."""
        routes = []
        for told in words.split("; "):
            found = _WORDS.fullmatch(told)
            if found is None or found[2] not in (None, *PHASES):
                raise MetainferError(f"'{told}' does not say which way an operation takes")
            steps = tuple(_step_of(way) for way in found[3].split(_THEN))
            if [step.up_to is None for step in steps] != [False] * (len(steps) - 1) + [True]:
                raise MetainferError(f"'{told}' does not say which way any size takes")
            phases = PHASES if found[2] is None else (found[2],)
            routes += [Route(found[1], phase, steps) for phase in phases]
        return cls(routes)


def _step_of(way: str) -> Step:
    found = _UP_TO.fullmatch(way)
    return Step(None, way) if found is None else Step(int(found[2]), found[1])
