"""Router: a group whose operations take the ways that the plan chose, once those are verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from metainfer.comm.contest import Contender, Point, contenders_on_cpus, problem, way_of
from metainfer.comm.group import GroupError
from metainfer.comm.host_memory import HostMemoryGroup, join_host_memory
from metainfer.comm.library import GLOO, LibraryGroup, join_library
from metainfer.comm.world import World, join
from metainfer.core.units import format_bytes
from metainfer.plan.comm_record import Way
from metainfer.plan.routes import DECODE, PREFILL, Rival, Router
from metainfer.plan.ways import SUMS
from metainfer.plan.wires import PLAIN

T = TypeVar("T")

_VERIFIED_BYTES = 2**20  # at most: what is sent in many pieces is verified where it is measured


def ways_of(points: Sequence[Point]) -> list[Way]:
    """Of a contest, by the middle sample."""
    found: dict[tuple[str, str, str], Rival] = {}
    for point in points:
        name = way_of(point.name, point.wire)
        key = point.operation, point.wire, name
        before = found.get(key, Rival(name, (), (), ordered=point.ordered))
        if point.wrong:
            why = f"at {format_bytes(point.bytes)}: {point.wrong}"
            found[key] = Rival(name, (), (), ordered=point.ordered, why_not=why)
        else:
            middle = sorted(point.seconds)[len(point.seconds) // 2]
            sizes, seconds = (*before.bytes, point.bytes), (*before.seconds, middle)
            found[key] = Rival(name, sizes, seconds, ordered=point.ordered)
    return [Way(operation, wire, rival) for (operation, wire, _), rival in found.items()]


@dataclass(frozen=True, slots=True)
class CpuCarriers:
    """What can carry the collectives of ranks on CPUs.

    Attributes:
        base: for what has no route: sends, objects, groups of other sizes.
        library: gloo, where a route takes it.
    """

    base: HostMemoryGroup
    library: LibraryGroup | None = None

    def contenders(self) -> list[Contender]:
        return contenders_on_cpus(self.base, self.library, dict.fromkeys((PLAIN, self.base.wire)))

    def part(self, ranks: Sequence[int], least: int) -> CpuCarriers:
        """`least`: ranks of groups that have routes; smaller ones need no library."""
        library = self.library
        if library is not None:
            library = library.part(ranks) if len(ranks) >= least else None
        return CpuCarriers(self.base.part(ranks), library)

    def close(self) -> None:
        if self.library is not None:
            self.library.close()
        self.base.close()


class RoutedGroup:
    """A group whose operations take the ways that a router chose (`comm.group.Group`). Groups of
    another number of ranks than the routes are for take those of their carrier."""

    def __init__(self, carriers: CpuCarriers, router: Router, ranks: int) -> None:
        """All ranks call it.

        Args:
            ranks: of a group that the routes are for.

        Raises GroupError: a way that was chosen brings wrong data.
        """
        base = carriers.base
        self.rank, self.size, self.wire = base.rank, base.size, base.wire
        self._base, self._carriers, self._router, self._ranks = base, carriers, router, ranks
        self._ways: dict[tuple[str, str, str], Contender] = {}
        if base.size == ranks:
            self._ways = {
                (one.operation, way_of(one.name, one.wire), one.wire): one
                for one in carriers.contenders()
            }
            self._verify()

    def _verify(self) -> None:
        seen: set[str] = set()
        for (operation, phase), route in self._router.routes.items():
            for number, step in enumerate(route.steps):
                way = self._way(operation, step.name, phase)
                if way.operation + way.name in seen:
                    continue
                seen.add(way.operation + way.name)
                size = min(step.up_to or _VERIFIED_BYTES, _VERIFIED_BYTES)
                wrong = problem(self._base, way, size, number)
                if wrong:
                    raise GroupError(
                        f"{operation} by {way.name} brings wrong data at {format_bytes(size)}:"
                        f" {wrong}"
                    )

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        if not self._ways:
            return self._base.all_reduce(partial, phase)
        return self._run("all_reduce", partial, phase)

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        if not self._ways:
            return self._base.all_gather(part_N, phase)
        return self._run("all_gather", part_N, phase)

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        if not self._ways:
            return self._base.reduce_scatter(partial_N, phase)
        return self._run("reduce_scatter", partial_N, phase)

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        if not self._ways:
            return self._base.all_to_all(parts_N, phase)
        return self._run("all_to_all", parts_N, phase)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._base.send(tensor, to)

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        return self._base.receive(like, sender)

    def gather(self, value: T) -> list[T] | None:
        return self._base.gather(value)

    def broadcast(self, value: T) -> T:
        return self._base.broadcast(value)

    def part(self, ranks: Sequence[int]) -> RoutedGroup:
        return RoutedGroup(self._carriers.part(ranks, self._ranks), self._router, self._ranks)

    def abort(self, why: str) -> None:
        self._base.abort(why)

    def close(self) -> None:
        self._carriers.close()

    def _run(self, operation: str, tensor: torch.Tensor, phase: str) -> torch.Tensor:
        name = self._router.choose(operation, tensor.nbytes, phase)
        return self._way(operation, name, phase).run(tensor)

    def _way(self, operation: str, name: str, phase: str) -> Contender:
        wire = self.wire if operation in SUMS and phase == PREFILL else PLAIN
        try:
            return self._ways[operation, name, wire]
        except KeyError:
            travels = "" if wire == PLAIN else f" in {wire}"
            raise GroupError(f"there is no {name} for {operation}{travels} here") from None


def join_routed(world: World, rank: int, router: Router, ranks: int, wire: str) -> RoutedGroup:
    """The group of all ranks of CPUs, once all are there.

    Args:
        ranks: of a group that the routes are for.
        wire: of sums of prefill, one of `plan.wires.WIRES`.

    Raises GroupError: a rank did not come, or a way that was chosen brings wrong data.
    """
    watch = join(world, rank)
    base = join_host_memory(world, rank, watch=watch, wire=wire)
    library = None
    if any(name.startswith(GLOO) for name in _names(router)):
        library = join_library(world, rank, GLOO, watch=watch, wire=wire)
    return RoutedGroup(CpuCarriers(base, library), router, ranks)


def _names(router: Router) -> Iterable[str]:
    return (step.name for route in router.routes.values() for step in route.steps)
