"""Ranks with GPUs, which are processes: every way that their memory allows, verified, and sums of
decode in a graph. Two processes may share one GPU, which says nothing of how fast they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from metainfer.comm.contenders import contenders_on_devices
from metainfer.comm.contest import problem
from metainfer.comm.device_memory import MEANS, DeviceGroup, Rows
from metainfer.comm.device_queue import CudaQueue
from metainfer.comm.group import sum_in_order
from metainfer.comm.host_memory import HostMemoryGroup, join_host_memory
from metainfer.comm.processes import Report, run_processes
from metainfer.comm.world import World, join
from metainfer.hardware.curves import LOAD, STORE
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.plan.foretold import ONE_KERNEL, ONE_KERNEL_BYTES
from metainfer.plan.wires import WIRES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

RANKS = 2
SIZES = (1024, 2**16, ONE_KERNEL_BYTES, 5 * 2**20)  # the last in several pieces
REPLAYS = 300


def _group(
    world: World, rank: int, means: str, kernel: str = ""
) -> tuple[DeviceGroup, HostMemoryGroup]:
    """A group of GPUs, and the ranks that it is of."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    watch = join(world, rank)
    host = join_host_memory(world, rank, watch=watch)
    rows = Rows(kernel, JitLauncher()) if kernel else None
    made = DeviceGroup(CudaQueue(), host.part(range(host.size)), watch, means, "plain", rows)
    return made, host


def _problems(world: World, rank: int, report: Report, way: tuple[str, str]) -> list[str]:
    means, kernel = way
    group, host = _group(world, rank, means, kernel)
    by_means, kernels = ({}, {kernel: group}) if kernel else ({means: group}, {})
    found = []
    for one in contenders_on_devices(by_means, kernels, WIRES):
        for number, size in enumerate(SIZES):
            if size <= ONE_KERNEL_BYTES or not one.name.startswith(ONE_KERNEL):
                wrong = problem(host, one, size, number, group.device)
                group.settle()
                found.append(f"{one.operation} by {one.name} at {size}: {wrong or 'right'}")
    group.close()
    host.close()
    return found


@pytest.mark.parametrize(
    "way", [*((means, "") for means in MEANS), (LOAD, STORE), (LOAD, LOAD)], ids=str
)
def test_every_way_brings_what_was_sent(way: tuple[str, str]) -> None:
    first, second = _in_processes(_problems, way)
    assert first == second and len(first) >= 3
    assert [told for told in first if not told.endswith(": right")] == []


def _replayed(world: World, rank: int, report: Report, kernel: str) -> list[int]:
    """Replays of a graph of two sums after which either was wrong."""
    group, host = _group(world, rank, LOAD, kernel)
    shape, dtype = (5, 512), torch.bfloat16
    own = torch.zeros(shape, dtype=dtype, device=group.device)
    warm = group.all_reduce(group.all_reduce(own.clone()))
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        once = group.all_reduce(own.clone())
        twice = group.all_reduce(once.clone())
    wrong = []
    for replay in range(REPLAYS):
        made = torch.Generator().manual_seed(replay)
        parts = [torch.randn(shape, generator=made).to(dtype) for _ in range(RANKS)]
        own.copy_(parts[rank])
        graph.replay()
        total = sum_in_order(parts)
        double = sum_in_order([total] * RANKS)
        if not (torch.equal(once.cpu(), total) and torch.equal(twice.cpu(), double)):
            wrong.append(replay)
    group.settle()
    assert bool((warm == 0).all())
    del graph
    group.close()
    host.close()
    return wrong


@pytest.mark.parametrize("kernel", [STORE, LOAD])
def test_sums_in_a_graph_are_right_however_often_it_is_replayed(kernel: str) -> None:
    assert _in_processes(_replayed, kernel) == [[], []]


def _in_processes(body: Callable[..., Any], argument: Any) -> list[Any]:
    world = World(RANKS, deadline_s=60.0)
    try:
        return run_processes(world, body, argument, longest_s=150.0)
    finally:
        world.close()
