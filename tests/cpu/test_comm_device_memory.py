"""Groups of GPUs whose queues are simulated: who waits for whom, and what lies where."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from metainfer.comm.algorithms import ALL_REDUCES, refusal
from metainfer.comm.device_memory import MEANS, DeviceGroup, join_devices
from metainfer.comm.group import Aborted, Group, sum_in_order
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.comm.wire import Plain
from metainfer.comm.world import World
from metainfer.core.errors import MetainferError
from metainfer.hardware.curves import COPY, LOAD, STAGED
from tests.fakes import rank_bodies
from tests.fakes.cpu_queue import CpuQueue
from tests.fakes.rank_bodies import numbers

T = TypeVar("T")


def _on_devices(
    size: int, means: str, body: Callable[[DeviceGroup], T], queues: list[CpuQueue] | None = None
) -> list[T]:
    world = World(size, deadline_s=20.0, piece_bytes=4096)
    made = queues if queues is not None else [CpuQueue() for _ in range(size)]

    def run(group: Group) -> T:
        joined = join_devices(world, group.rank, made[group.rank], means)
        found = body(joined)
        joined.close()
        return found

    try:
        return run_ranks(virtual_groups(size), run)
    finally:
        world.close()


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_algorithm_gives_the_bits_of_a_sum_in_order(means: str, size: int) -> None:
    dtype, shapes = torch.bfloat16, ((1,), (3, 5), (9, 1000))
    names = [name for name in ALL_REDUCES if not refusal(name, size, Plain(dtype))]

    def body(group: DeviceGroup) -> list[torch.Tensor]:
        return [
            group.all_reduce_by(name, numbers(group.rank, shape, dtype))
            for shape in shapes
            for name in names
        ]

    for found in _on_devices(size, means, body):
        for place, shape in enumerate(shapes):
            wanted = sum_in_order([numbers(rank, shape, dtype) for rank in range(size)])
            for got in found[place * len(names) : (place + 1) * len(names)]:
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("means", MEANS)
def test_operations_and_parts_give_what_virtual_ranks_give(means: str) -> None:
    queues = [CpuQueue() for _ in range(3)]
    found = _on_devices(3, means, rank_bodies.some_of_all, queues)
    assert found == run_ranks(virtual_groups(3), rank_bodies.some_of_all)
    for queue in queues:  # all was given back
        assert not queue.owned and not queue.opened and not queue.reached
        assert ("load" in {what for what, _ in queue.log}) == (means == LOAD)


def test_an_all_gather_reads_each_peer_once() -> None:
    """Two pieces of a page each: what a rank posts, and what it reads of two others."""
    queues = [CpuQueue() for _ in range(3)]

    def body(group: DeviceGroup) -> None:
        queues[group.rank].log.clear()
        group.all_gather(torch.zeros(8192, dtype=torch.uint8))
        queues[group.rank].log.append(("end", 0))

    _on_devices(3, COPY, body, queues)
    for queue in queues:
        done = queue.log[: queue.log.index(("end", 0))]
        assert [size for what, size in done if what == "copy"] == [4096] * 6
        assert [number for what, number in done if what == "write"] == [1, 2]


def test_queues_that_wait_for_a_rank_that_gave_up_are_let_go() -> None:
    def body(group: DeviceGroup) -> str:
        assert group.broadcast("begin") == "begin"
        if group.rank == 1:
            group.abort("the plan changed")
            return ""
        group.all_reduce(torch.ones(4))  # its queue waits, and then goes on over anything
        with pytest.raises(Aborted) as raised:
            group.settle()
        return str(raised.value)

    assert _on_devices(2, STAGED, body)[0] == "rank 1 gave up: the plan changed"


def test_unknown_means_are_refused() -> None:
    with pytest.raises(MetainferError, match="no means pigeon"):
        _on_devices(2, "pigeon", lambda group: None)
