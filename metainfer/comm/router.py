"""Router: which way an operation takes, by bytes and phase, and why.

Ways are compared by curves of time against bytes: measured by a contest among the ranks at hand, or
foretold (`comm.foretold`) from what a Machine record says of its links. Times are those of the
slowest rank, one rank decides, and all are told: ranks that decide on their own deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch

from metainfer.comm.contest import Contender, Point, contest
from metainfer.comm.group import Group
from metainfer.core.errors import MetainferError
from metainfer.core.units import format_bytes, format_seconds

T = TypeVar("T")

DECODE, PREFILL = "decode", "prefill"
PHASES = (DECODE, PREFILL)
_GAIN = 0.03  # for which the way is changed as bytes grow


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
    seconds: that it takes at the largest size compared.
    second, second_s: the runner-up there, "" for none, and its time.
    """

    up_to: int | None
    name: str
    seconds: float
    second: str
    second_s: float


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
    refused: tuple[tuple[str, str], ...]

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


def route(operation: str, phase: str, rivals: Sequence[Rival], *, any_order: bool = False) -> Route:
    """The fastest at each size that all were measured at. The first of `rivals` wins a tie.

    Args:
        any_order: take ways too whose sums are not those in the order of ranks.

    Raises MetainferError: nothing can be taken.
    """
    refused = [(rival.name, rival.why_not) for rival in rivals if rival.why_not]
    left = []
    for rival in rivals:
        if rival.why_not:
            continue
        if phase not in rival.phases:
            refused.append((rival.name, f"cannot be taken in {phase}"))
        elif not rival.ordered and not any_order:
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


def rivals_of(points: Sequence[Point], operation: str) -> list[Rival]:
    """Of a contest, by the middle sample."""
    found: dict[str, Rival] = {}
    for point in points:
        if point.operation != operation:
            continue
        before = found.get(point.name, Rival(point.name, (), (), ordered=point.ordered))
        if point.wrong:
            why = f"at {format_bytes(point.bytes)}: {point.wrong}"
            found[point.name] = Rival(point.name, (), (), ordered=point.ordered, why_not=why)
        else:
            middle = sorted(point.seconds)[len(point.seconds) // 2]
            found[point.name] = Rival(
                point.name,
                (*before.bytes, point.bytes),
                (*before.seconds, middle),
                ordered=point.ordered,
            )
    return list(found.values())


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


def route_by_contest(
    group: Group,
    contenders: Sequence[Contender],
    sizes: Sequence[int],
    until_s: float,
    *,
    samples: int = 3,
    any_order: bool = False,
) -> Router:
    """Every rank calls it, and all have the same router: rank 0 decides."""
    points = contest(group, contenders, sizes, samples, until_s)
    routes = []
    if group.rank == 0:
        for operation in dict.fromkeys(contender.operation for contender in contenders):
            rivals = rivals_of(points, operation)
            routes += [route(operation, phase, rivals, any_order=any_order) for phase in PHASES]
    return Router(group.broadcast(routes))


class RoutedGroup:
    """A group whose operations take the ways that a router chose (`comm.group.Group`).

    Attributes:
        phase: of the step at hand; whoever runs steps sets it, the same on all ranks.
    """

    def __init__(self, base: Group, contenders: Sequence[Contender], router: Router) -> None:
        """`base`: for what has no route: sends, objects, parts."""
        self.rank, self.size = base.rank, base.size
        self.phase = PREFILL
        self._base, self._router = base, router
        self._ways = {(c.operation, c.name): c for c in contenders}

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self._run("all_reduce", partial)

    def all_gather(self, part_N: torch.Tensor) -> torch.Tensor:
        return self._run("all_gather", part_N)

    def reduce_scatter(self, partial_N: torch.Tensor) -> torch.Tensor:
        return self._run("reduce_scatter", partial_N)

    def all_to_all(self, parts_N: torch.Tensor) -> torch.Tensor:
        return self._run("all_to_all", parts_N)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._base.send(tensor, to)

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        return self._base.receive(like, sender)

    def gather(self, value: T) -> list[T] | None:
        return self._base.gather(value)

    def broadcast(self, value: T) -> T:
        return self._base.broadcast(value)

    def part(self, ranks: Sequence[int]) -> Group:
        return self._base.part(ranks)

    def close(self) -> None:
        self._base.close()

    def _run(self, operation: str, tensor: torch.Tensor) -> torch.Tensor:
        name = self._router.choose(operation, tensor.nbytes, self.phase)
        return self._ways[operation, name].run(tensor)
