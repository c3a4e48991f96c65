"""Router: a group whose operations take the ways that the plan chose, once those are verified."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from metainfer.comm import library
from metainfer.comm.carriers import Carriers, CpuCarriers, Devices, GpuCarriers
from metainfer.comm.contenders import way_of
from metainfer.comm.contest import Contender, Point, problem
from metainfer.comm.device_memory import MEANS
from metainfer.comm.group import GroupError
from metainfer.comm.host_memory import join_host_memory
from metainfer.comm.library import GLOO, LibraryGroup, join_library
from metainfer.comm.queue import Queue
from metainfer.comm.world import World, join
from metainfer.core.units import format_bytes
from metainfer.hardware.curves import LOAD, NCCL, STORE
from metainfer.kernels.triton.launch import Launcher
from metainfer.plan.comm_record import Way
from metainfer.plan.foretold import ONE_KERNEL
from metainfer.plan.routes import DECODE, PREFILL, SUMS, Rival, Router
from metainfer.plan.wires import PLAIN

T = TypeVar("T")

_log = logging.getLogger(__name__)

_VERIFIED_BYTES = 2**20  # at most: what is sent in many pieces is verified where it is measured


def ways_of(points: Sequence[Point]) -> list[Way]:
    """Of a contest, by the best sample: what others on the machine took is not the way's."""
    found: dict[tuple[str, str, str], Rival] = {}
    for point in points:
        name = way_of(point.name, point.wire)
        key = point.operation, point.wire, name
        before = found.get(key, Rival(name, (), (), ordered=point.ordered))
        if point.wrong:
            why = f"at {format_bytes(point.bytes)}: {point.wrong}"
            found[key] = Rival(name, (), (), ordered=point.ordered, why_not=why)
        else:
            sizes, seconds = (*before.bytes, point.bytes), (*before.seconds, min(point.seconds))
            found[key] = Rival(name, sizes, seconds, ordered=point.ordered)
    return [Way(operation, wire, rival) for (operation, wire, _), rival in found.items()]


class RoutedGroup:
    """A group whose operations take the ways that a router chose (`comm.group.Group`). Groups of
    another number of ranks than the routes are for take those of their carrier."""

    def __init__(self, carriers: Carriers, router: Router, ranks: int) -> None:
        """All ranks call it.

        Args:
            ranks: of a group that the routes are for.

        Raises GroupError: a way that was chosen brings wrong data, and nothing stands in for it.
        """
        base = carriers.base
        self.rank, self.size, self.wire = base.rank, base.size, base.wire
        self._base, self._carriers, self._router, self._ranks = base, carriers, router, ranks
        self._ways: dict[tuple[str, str, str], Contender] = {}
        self._wrong: set[tuple[str, str, str]] = set()
        if base.size == ranks:
            self._ways = {
                (one.operation, way_of(one.name, one.wire), one.wire): one
                for one in carriers.contenders()
            }
            self._verify()

    def _verify(self) -> None:
        """Of each way that was chosen, at the largest size that it is chosen for, within bounds."""
        seen: set[tuple[str, str, str]] = set()
        for (operation, phase), route in self._router.routes.items():
            for number, step in enumerate(route.steps):
                key = operation, step.name, self._wire_of(operation, phase)
                if key in seen:
                    continue
                seen.add(key)
                size = min(step.up_to or _VERIFIED_BYTES, _VERIFIED_BYTES)
                wrong = problem(self._base, self._way(*key), size, number, self._base.device)
                if wrong:
                    self._leave(key, f"brings wrong data at {format_bytes(size)}: {wrong}")

    def _leave(self, key: tuple[str, str, str], why: str) -> None:
        operation, name, wire = key
        told = f"{operation} by {name}{_travels(wire)} {why}"
        fallback = self._carriers.fallback
        if not fallback or fallback == name:
            raise GroupError(told)
        self._wrong.add(key)
        if self.rank == 0:
            _log.warning("%s; %s stands in for it", told, fallback)

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
        return self._way(operation, name, self._wire_of(operation, phase)).run(tensor)

    def _wire_of(self, operation: str, phase: str) -> str:
        return self.wire if operation in SUMS and phase == PREFILL else PLAIN

    def _way(self, operation: str, name: str, wire: str) -> Contender:
        if (operation, name, wire) in self._wrong:
            name = self._carriers.fallback
        try:
            return self._ways[operation, name, wire]
        except KeyError:
            raise GroupError(f"there is no {name} for {operation}{_travels(wire)} here") from None


def _travels(wire: str) -> str:
    return "" if wire == PLAIN else f" in {wire}"


def join_routed(world: World, rank: int, router: Router, ranks: int, wire: str) -> RoutedGroup:
    """The group of all ranks of CPUs, once all are there.

    Args:
        ranks: of a group that the routes are for.
        wire: of sums of prefill, one of `plan.wires.WIRES`.

    Raises GroupError: a rank did not come, or a way that was chosen brings wrong data.
    """
    watch = join(world, rank)
    base = join_host_memory(world, rank, watch=watch, wire=wire)
    gloo = None
    if any(name.startswith(GLOO) for name in _names(router)):
        gloo = join_library(world, rank, GLOO, watch=watch, wire=wire)
    return RoutedGroup(CpuCarriers(base, gloo), router, ranks)


def join_routed_gpus(
    world: World,
    rank: int,
    router: Router,
    ranks: int,
    wire: str,
    queue: Callable[[], Queue],
    launch: Callable[[], Launcher],
    moves: str = library.NCCL,
) -> RoutedGroup | LibraryGroup:
    """The same of GPUs: NCCL alone where no route takes anything else.

    Args:
        queue: makes that of this rank's GPU.
        launch: makes what starts kernels there.
        moves: the library in NCCL's place.

    Raises MetainferError: a GPU does not reach another's memory.
    """
    names = _names(router)
    watch = join(world, rank)
    # What NCCL sums is the same on all ranks too, and it sums faster than it gathers.
    base = join_library(world, rank, moves, watch=watch, own_sums=False, wire=wire)
    if names <= {NCCL}:
        return base
    kernels = tuple(m for m in (STORE, LOAD) if f"{ONE_KERNEL} by {m}" in names)
    others = [name for name in names if not name.startswith(ONE_KERNEL)]
    means = tuple(m for m in MEANS if any(name.endswith(f" by {m}") for name in others))
    host = join_host_memory(world, rank, watch=watch)
    devices = Devices(queue(), watch, means, kernels, launch())
    return RoutedGroup(GpuCarriers(base, host, devices), router, ranks)


def _names(router: Router) -> set[str]:
    """Of all ways that are chosen."""
    return {step.name for route in router.routes.values() for step in route.steps}
