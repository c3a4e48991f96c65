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
from metainfer.comm.processes import Report
from metainfer.comm.world import World


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


def all_operations(world: World, rank: int, report: Report, argument: Any) -> list[Any]:
    group = join_host_memory(world, rank)
    found = some_of_all(group)
    group.close()
    return found


def fails(world: World, rank: int, report: Report, argument: Any) -> None:
    group = join_host_memory(world, rank)
    report(rank)
    if rank == 1:
        raise ValueError("no such expert")
    group.all_reduce(torch.ones(4))


def is_late(world: World, rank: int, report: Report, argument: Any) -> None:
    group = join_host_memory(world, rank)
    if rank == 1:
        time.sleep(30)
    group.all_gather(torch.ones(4))


def killed_at_random(world: World, rank: int, report: Report, seed: int) -> None:
    """Operations without end; one rank is killed before some line of the code of groups. Others
    report what they saw of it."""
    chance = random.Random(seed)
    victim, lines = chance.randrange(world.size), int(10 ** chance.uniform(0.5, 4.0))
    if rank == victim:
        _die_after(lines)
    group: HostMemoryGroup | None = None
    try:
        group = join_host_memory(world, rank)
        for _ in range(10_000):
            some_of_all(group)
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
