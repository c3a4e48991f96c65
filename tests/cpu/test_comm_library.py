"""Groups over torch.distributed: the sums of every other group, and an end that says why."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from metainfer.comm.group import GroupError, RankLost, Stalled, sum_in_order
from metainfer.comm.host_memory import join_host_memory
from metainfer.comm.processes import run_processes
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.comm.watch import Watch, Watchdog
from metainfer.comm.world import World
from tests.fakes import rank_bodies
from tests.fakes.rank_bodies import numbers

KILLS = 8


@pytest.fixture(scope="module", autouse=True)
def _quick_starts() -> None:
    multiprocessing.set_forkserver_preload(["tests.fakes.rank_bodies"])


@pytest.fixture
def world() -> Iterator[World]:
    made = World(3, deadline_s=20.0)
    yield made
    made.close()


def _run(world: World, body: Any, argument: Any) -> list[Any]:
    return run_processes(world, body, argument, longest_s=60, method="forkserver")


def test_what_virtual_ranks_compute_is_what_gloo_moves(world: World) -> None:
    found = _run(world, rank_bodies.all_operations, "gloo")
    assert found == run_ranks(virtual_groups(3), rank_bodies.some_of_all)


def test_large_sums_are_made_in_the_order_of_ranks(world: World) -> None:
    parts = [numbers(rank, (701, 128), torch.bfloat16) for rank in range(3)]
    for found in _run(world, rank_bodies.large_sums, "plain"):
        assert torch.equal(found, sum_in_order(parts))


def test_8_bits_give_what_they_give_in_shared_memory(world: World) -> None:
    def body(rank: int) -> torch.Tensor:
        group = join_host_memory(other, rank)
        return group.all_reduce_by("two-shot", numbers(rank, (701, 128), torch.bfloat16), "int8")

    other = World(3, deadline_s=20.0)
    wanted = run_ranks(virtual_groups(3), lambda group: body(group.rank))
    other.close()
    for found in _run(world, rank_bodies.large_sums, "int8"):
        assert torch.equal(found, wanted[0])


def test_the_library_may_sum_itself(world: World) -> None:
    total = [[3.0 * row + 3.0] for row in range(6)]
    found = _run(world, rank_bodies.sums_of_the_library, None)
    assert found == [[total, total[2 * rank : 2 * rank + 2]] for rank in range(3)]


def test_a_late_rank_is_named() -> None:
    world = World(3, deadline_s=0.7)
    with pytest.raises(
        Stalled, match=r"in all_gather of 16 bytes .* for rank 1 \(rank 1 is in join"
    ):
        _run(world, rank_bodies.is_late, None)
    world.close()


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_is_killed_anywhere_and_all_others_end(world: World, seed: int) -> None:
    told: dict[int, str] = {}
    with pytest.raises(RankLost, match=r"the process of rank \d ended with SIGKILL"):
        run_processes(
            world, rank_bodies.killed_at_random, ("gloo", seed), longest_s=60, method="forkserver",
            on_report=told.__setitem__,
        )  # fmt: skip
    assert len(told) == 2
    assert all("ended" in text for text in told.values())


def test_a_watchdog_tells_once_while_its_rank_is_busy() -> None:
    world = World(2)
    told: list[str] = []
    joined = threading.Barrier(2)

    def body(rank: int) -> None:
        watch = Watch(world.memory, rank, 2, 20.0)
        watch.join()
        joined.wait(10)
        if rank == 1:
            watch.fail("the plan changed")
            return
        dog = Watchdog(watch, lambda error: told.append(str(error)), every_s=0.01)
        with pytest.raises(GroupError):
            watch.until(lambda: False, lambda: [1])
        while not told:
            dog._ended.wait(0.01)
        dog.end()

    run_ranks(virtual_groups(2), lambda group: body(group.rank))
    assert told == ["rank 1 gave up: the plan changed"]
    world.close()


def test_threads_of_a_rank_may_look_at_the_same_time() -> None:
    world = World(2)

    def body(rank: int) -> int:
        watch = Watch(world.memory, rank, 2, 20.0)
        watch.join()

        def look() -> int:
            for _ in range(3000):
                watch.check()
            return 1

        with ThreadPoolExecutor(3) as pool:
            return sum(pool.map(lambda _: look(), range(3)))

    assert run_ranks(virtual_groups(2), lambda group: body(group.rank)) == [3, 3]
    world.close()
