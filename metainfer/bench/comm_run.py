"""A run of `bench comm`: processes that try every way of an operation in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from metainfer.bench.comm_report import record, too_noisy
from metainfer.bench.comm_settings import CommLoad
from metainfer.comm.contenders import contenders_on_cpus
from metainfer.comm.contest import (
    Contender,
    Links,
    Point,
    contest,
    measure_links,
)
from metainfer.comm.host_memory import join_host_memory
from metainfer.comm.library import GLOO, join_library
from metainfer.comm.processes import Report, run_processes
from metainfer.comm.router import ways_of
from metainfer.comm.world import World, join
from metainfer.hardware.machine import Machine
from metainfer.plan.comm_record import Way
from metainfer.plan.wires import PLAIN

_START_S = 120.0  # for processes to begin and to end, beside what is measured

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank came back with.

    Attributes:
        links: what the floor is made of.
        points: the same of all ranks.
        missing: peer -> why it is not there.
    """

    links: Links
    points: list[Point]
    missing: dict[str, str]


def run_comm(
    load: CommLoad, machine: Machine, on_progress: OnProgress
) -> tuple[dict[str, Any], list[Way]]:
    """The record of a run on the machine at hand, and what plans may go by, nothing where it is too
    noisy. Raises GroupError where ranks could not go on together."""
    threads = max(1, machine.cpu.physical_cores // load.ranks)
    world = World(load.ranks)
    try:
        found = run_processes(
            world,
            _measure,
            (load, threads),
            longest_s=load.budget_s + _START_S,
            on_report=lambda rank, done: on_progress(*done),
        )[0]
    finally:
        world.close()
    facts = json.loads(machine.to_json())
    made = record(load, threads, found.links, found.points, found.missing, facts)
    return made, [] if too_noisy(found.points) else ways_of(found.points)


def _measure(world: World, rank: int, report: Report, asked: tuple[CommLoad, int]) -> Found:
    """In the process of a rank."""
    load, threads = asked
    torch.set_num_threads(threads)
    watch = join(world, rank)
    shared = join_host_memory(world, rank, watch=watch)
    missing = {} if dist.is_available() else {GLOO: "this torch has no torch.distributed"}
    library = None if missing else join_library(world, rank, GLOO, watch=watch)
    ways = _asked_for(contenders_on_cpus(shared, library, (PLAIN, *load.wires)), load)
    links = measure_links(shared)
    total, done = len(ways) * len(load.sizes), 0

    def tell(point: Point) -> None:
        nonlocal done
        done += 1
        if rank == 0:
            report((done, total))

    until_s = time.monotonic() + load.budget_s
    points = contest(shared, ways, load.sizes, load.rounds, until_s, tell)
    if library is not None:
        library.close()
    shared.close()
    return Found(links, points, missing)


def _asked_for(ways: list[Contender], load: CommLoad) -> list[Contender]:
    order = {operation: place for place, operation in enumerate(load.operations)}
    left = [way for way in ways if way.operation in order]
    return sorted(left, key=lambda way: order[way.operation])
