"""Groups in shared memory: the same bits by every algorithm, and an end for all when one ends."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from metainfer.comm.algorithms import ALL_REDUCES, refusal
from metainfer.comm.group import Aborted, GroupError, RankLost, Stalled, sum_in_order
from metainfer.comm.host_memory import HostMemoryGroup, join_host_memory
from metainfer.comm.processes import run_processes
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.comm.wire import BLOCK, EightBit, Plain, wire_of
from metainfer.comm.world import World
from metainfer.core.errors import MetainferError
from metainfer.plan.routes import PREFILL
from tests.fakes import rank_bodies
from tests.fakes.rank_bodies import numbers

T = TypeVar("T")
KILLS = 20


@pytest.fixture(scope="module", autouse=True)
def _quick_starts() -> None:
    """Processes come from one that has imported torch already, and has no threads."""
    multiprocessing.set_forkserver_preload(["tests.fakes.rank_bodies"])


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(getattr(request, "param", 3), deadline_s=20.0, piece_bytes=4096)
    yield made
    made.close()


def _in_threads(
    size: int,
    body: Callable[[HostMemoryGroup], T],
    *,
    piece_bytes: int = 4096,
    deadline_s: float = 20.0,
    wire: str = "plain",
) -> list[T]:
    """Threads do what processes would, and start at once."""
    world = World(size, deadline_s=deadline_s, piece_bytes=piece_bytes)

    def run(rank: int) -> T:
        group = join_host_memory(world, rank, wire=wire)
        try:
            return body(group)
        finally:
            group.close()

    try:
        return run_ranks(virtual_groups(size), lambda group: run(group.rank))
    finally:
        world.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_every_algorithm_gives_the_bits_of_a_sum_in_order(size: int, dtype: torch.dtype) -> None:
    """Pieces of 4 KB, so that all but the first have several, and the last is not full."""
    shapes = ((1,), (3, 5), (7, 128), (9, 1000), (0, 4))
    names = [name for name in ALL_REDUCES if not refusal(name, size, Plain(dtype))]
    assert len(names) == (4 if size == 4 else 3)

    def body(group: HostMemoryGroup) -> list[torch.Tensor]:
        return [
            group.all_reduce_by(name, numbers(group.rank, shape, dtype))
            for shape in shapes
            for name in names
        ]

    found = _in_threads(size, body)
    for place, shape in enumerate(shapes):
        wanted = sum_in_order([numbers(rank, shape, dtype) for rank in range(size)])
        for number, name in enumerate(names):
            for of_rank in found:
                got = of_rank[place * len(names) + number]
                assert got.dtype == dtype
                assert torch.equal(got, wanted), (name, shape)


def test_what_virtual_ranks_compute_is_what_processes_compute(world: World) -> None:
    found = run_processes(
        world, rank_bodies.all_operations, "host", longest_s=60, method="forkserver"
    )
    assert found == run_ranks(virtual_groups(3), rank_bodies.some_of_all)


def test_pieces_larger_than_a_channel_arrive() -> None:
    sent = torch.arange(200_001, dtype=torch.int32)

    def body(group: HostMemoryGroup) -> bool:
        if group.rank == 0:
            group.send(sent, 1)
            return True
        return bool((group.receive(torch.empty_like(sent), 0) == sent).all())

    assert _in_threads(2, body) == [True, True]


def test_parts_of_parts_and_parts_that_ranks_made_unequally_many_of() -> None:
    def body(group: HostMemoryGroup) -> list[float]:
        one = torch.tensor([float(2**group.rank)])
        found = []
        if group.rank < 2:
            pair = group.part([0, 1])
            found.append(pair.part([pair.rank]).all_reduce(one.clone()).item())
        else:
            pair = group.part([3, 2])
        found.append(pair.all_reduce(one.clone()).item())
        across = group.part([0, 3] if group.rank in (0, 3) else [1, 2])
        found.append(across.all_reduce(one.clone()).item())
        found.append(group.all_reduce(one).item())
        return found

    assert _in_threads(4, body) == [
        [1.0, 3.0, 9.0, 15.0], [2.0, 3.0, 6.0, 15.0], [12.0, 6.0, 15.0], [12.0, 9.0, 15.0],
    ]  # fmt: skip


# ---- 8 bits ----


@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_8_bits_are_the_same_on_all_ranks_and_in_pieces(wire: str) -> None:
    shape = (11, 3 * BLOCK)
    parts = [numbers(0, shape, torch.bfloat16) + rank for rank in range(3)]
    exact = sum_in_order(parts).float()

    def body(group: HostMemoryGroup) -> list[torch.Tensor]:
        own = parts[group.rank]
        found = [group.all_reduce_by(n, own.clone(), wire) for n in ("one-shot", "two-shot")]
        return [*found, group.reduce_scatter(torch.cat([own] * 3), PREFILL)]

    small, large = _in_threads(3, body, wire=wire), _in_threads(
        3, body, piece_bytes=2**20, wire=wire
    )  # fmt: skip
    step = exact.abs().amax() / (127 if wire == "int8" else 8)
    for found in (*small, *large):
        assert torch.equal(found[0], small[0][0])
        assert torch.equal(found[1], found[0])  # both round what each rank has, and the sum
        assert torch.equal(found[2], small[0][2])
        for got in found:
            assert (got.float() - exact).abs().max() <= 2 * step


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_blocks_keep_their_largest_number_and_zeros(codes: torch.dtype) -> None:
    wire = EightBit(codes)
    values = torch.zeros(2 * BLOCK)
    values[3], values[BLOCK + 1], values[BLOCK + 2] = -96.5, float("inf"), 1.0
    coded = wire.encode(values)
    assert len(coded) == 2 * (BLOCK + 4)
    decoded = wire.decode(coded)
    assert torch.allclose(decoded[:BLOCK], values[:BLOCK], rtol=1e-6)
    assert not decoded[BLOCK:].isfinite().any()


def test_what_cannot_travel_in_8_bits_is_refused() -> None:
    for tensor in (torch.zeros(4, 100), torch.zeros(4, BLOCK, dtype=torch.int32)):
        with pytest.raises(MetainferError, match="cannot travel as int8"):
            wire_of("int8", tensor)
    assert "fp32" in (refusal("ring", 2, EightBit(torch.int8)) or "")
    assert "at least two" in (refusal("two islands", 2, Plain(torch.float32)) or "")


# ---- ends ----


def test_a_late_rank_is_named_with_what_both_do() -> None:
    def body(group: HostMemoryGroup) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(4))
        else:
            time.sleep(1.0)

    with pytest.raises(Stalled, match=r"in all_reduce of 16 bytes .* for rank 1 \(rank 1 is in jo"):
        _in_threads(2, body, deadline_s=0.1)


def test_abort_frees_whoever_waits_and_the_group_is_of_no_more_use() -> None:
    def body(group: HostMemoryGroup) -> None:
        assert group.broadcast("begin") == "begin"
        if group.rank == 1:
            group.abort("the plan changed")
            return
        with pytest.raises(Aborted, match="rank 1 gave up: the plan changed"):
            group.receive(torch.empty(1), 1)
        with pytest.raises(Aborted, match="the plan changed"):
            group.all_reduce(torch.ones(1))

    _in_threads(2, body)


def test_a_rank_that_left_is_not_waited_for() -> None:
    def body(group: HostMemoryGroup) -> None:
        if group.rank == 0:
            with pytest.raises(RankLost, match="rank 1 has left"):
                group.all_gather(torch.ones(1))

    _in_threads(2, body)


def test_ranks_that_call_different_things_are_told() -> None:
    def body(group: HostMemoryGroup) -> None:
        if group.rank == 0:
            group.all_gather(torch.ones(2))
        else:
            group.all_gather(torch.ones(3))

    with pytest.raises(GroupError, match="all_gather of 8 bytes.*all_gather of 12|12.*of 8 bytes"):
        _in_threads(2, body)


def test_an_error_of_one_process_ends_all_with_it(world: World) -> None:
    seen: list[int] = []
    with pytest.raises(GroupError, match="rank 1 failed with ValueError: no such expert"):
        run_processes(
            world, rank_bodies.fails, None, longest_s=60, method="forkserver",
            on_report=lambda rank, report: seen.append(rank),
        )  # fmt: skip
    assert 1 in seen
    folder = world.folder
    world.close()
    assert not folder.exists()


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_is_killed_anywhere_and_all_others_end(world: World, seed: int) -> None:
    told: dict[int, str] = {}
    with pytest.raises(RankLost, match=r"the process of rank \d ended with SIGKILL"):
        run_processes(
            world, rank_bodies.killed_at_random, ("host", seed), longest_s=60, method="forkserver",
            on_report=told.__setitem__,
        )  # fmt: skip
    assert len(told) == 2
    assert all("ended" in text for text in told.values())  # seen, not waited for
    assert not multiprocessing.active_children()
