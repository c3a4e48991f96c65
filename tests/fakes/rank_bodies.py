"""What processes of ranks do in tests."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from types import FrameType
from typing import Any

import torch

from metainfer.comm.group import Group, GroupError
from metainfer.comm.host_memory import HostMemoryGroup, join_host_memory
from metainfer.comm.library import LibraryGroup, join_library
from metainfer.comm.processes import Report
from metainfer.comm.world import World
from metainfer.plan.routes import PREFILL


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, so that the order of a sum shows in its bits."""
    made = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=made) * 10.0 ** (3 - rank)).to(dtype)


def some_of_all(group: Group) -> list[Any]:
    """Results of each operation, as plain numbers."""
    rank, size = group.rank, group.size
    partial = numbers(rank, (size * 3, 5), torch.float32)
    found = [
        group.all_reduce(partial.clone()),
        group.all_gather(partial),
        group.reduce_scatter(partial),
        group.all_to_all(partial),
    ]
    group.send(partial, (rank + 1) % size)
    found.append(group.receive(partial, (rank - 1) % size))
    half = group.part([r for r in range(size) if r % 2 == rank % 2])
    found.append(half.all_reduce(torch.tensor([float(rank)])))
    return [tensor.tolist() for tensor in found] + [group.gather(rank), group.broadcast(rank)]


def join(kind: str, world: World, rank: int) -> HostMemoryGroup | LibraryGroup:
    return join_host_memory(world, rank) if kind == "host" else join_library(world, rank, kind)


def all_operations(world: World, rank: int, report: Report, kind: str) -> list[Any]:
    group = join(kind, world, rank)
    found = some_of_all(group)
    group.close()
    return found


def large_sums(world: World, rank: int, report: Report, wire: str) -> torch.Tensor:
    """Over gloo, of more bytes than are gathered whole, and of rows that cannot be divided."""
    group = join_library(world, rank, "gloo", wire=wire)
    found = group.all_reduce(numbers(rank, (701, 128), torch.bfloat16), PREFILL)
    group.close()
    return found


def sums_of_the_library(world: World, rank: int, report: Report, argument: Any) -> list[Any]:
    group = join_library(world, rank, "gloo", own_sums=False)
    whole = torch.arange(6.0).view(6, 1) + rank
    found = [group.all_reduce(whole.clone()).tolist(), group.reduce_scatter(whole).tolist()]
    group.close()
    return found


def fails(world: World, rank: int, report: Report, argument: Any) -> None:
    group = join_host_memory(world, rank)
    report(rank)
    if rank == 1:
        raise ValueError("no such expert")
    group.all_reduce(torch.ones(4))


def is_late(world: World, rank: int, report: Report, argument: Any) -> None:
    group = join_library(world, rank, "gloo")
    if rank == 1:
        time.sleep(2)
    group.all_gather(torch.ones(4))


def killed_at_random(world: World, rank: int, report: Report, argument: tuple[str, int]) -> None:
    """Operations without end; one rank is killed before some line of the code of groups. Others
    report what they saw of it."""
    kind, seed = argument
    chance = random.Random(seed)
    victim, lines = chance.randrange(world.size), int(10 ** chance.uniform(0.5, 4.0))
    if rank == victim:
        _die_after(lines)
    group = None
    try:
        group = join(kind, world, rank)
        for _ in range(10_000):
            some_of_all(group)
            group.all_reduce(torch.ones(60_000))
            if isinstance(group, HostMemoryGroup):
                group.all_reduce_by("ring", torch.ones(3000))
    except GroupError as error:
        report(str(error))
    finally:
        if group:
            group.close()


def _die_after(lines: int) -> None:
    """Kill this process before one of the next lines of metainfer.comm."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "/comm/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
