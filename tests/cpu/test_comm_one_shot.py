"""One-shot sums in the interpreter: one rank runs; what its peers do is written before."""

from __future__ import annotations

import ctypes

import pytest
import torch

from metainfer.comm.group import Group, Stalled, sum_in_order
from metainfer.comm.host_memory import join_host_memory
from metainfer.comm.one_shot import OneShot
from metainfer.comm.one_shot_kernel import (
    ABORT,
    COUNTER,
    DATA_AT,
    LATE,
    MOST_PROGRAMS,
    TICKETS,
    area_bytes,
    start_one_shot,
    state_at,
)
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.comm.world import World
from metainfer.kernels.triton.launch import JitLauncher
from tests.fakes.cpu_queue import CpuQueue
from tests.fakes.rank_bodies import numbers

SIZE, RANK, SLOT_BYTES = 3, 1, 16384


class _Areas:
    """Those of all ranks, as memory of this process."""

    def __init__(self) -> None:
        self._memory = [(ctypes.c_ubyte * area_bytes(SIZE, SLOT_BYTES))() for _ in range(SIZE)]
        self.starts = [ctypes.addressof(memory) for memory in self._memory]

    def word(self, rank: int, at: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self.starts[rank] + at)

    def flag(self, rank: int, of: int, program: int) -> ctypes.c_int32:
        """In a rank's area, what another tells its program."""
        return self.word(rank, 4 * (of * MOST_PROGRAMS + program))

    def part(self, rank: int, number: int, of: int, like: torch.Tensor) -> torch.Tensor:
        """What lies in a rank's area of another, in round `number`."""
        begin = DATA_AT + (number % 2 * SIZE + of) * SLOT_BYTES
        whole = torch.frombuffer(self._memory[rank], dtype=torch.uint8)
        return whole[begin : begin + like.nbytes].view(like.dtype)

    def sum(self, partial: torch.Tensor, push: bool, longest: int) -> torch.Tensor:
        total = torch.empty_like(partial)
        starts = torch.tensor(self.starts, dtype=torch.int64)
        start_one_shot(
            JitLauncher((9, 0), 132), partial, total, starts, RANK, SIZE, SLOT_BYTES, push=push,
            longest=longest,
        )  # fmt: skip
        return total


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_order_over_rounds_of_several_sizes(push: bool, dtype: torch.dtype) -> None:
    areas = _Areas()
    for number, count in enumerate((100, 2500, 7, 4096), start=1):
        parts = [numbers(rank + number, (count,), dtype) for rank in range(SIZE)]
        if dtype == torch.bfloat16:  # which the interpreter cuts off where a GPU rounds
            parts = [part.round().clamp(-64, 64) for part in parts]
        programs = -(-count // 1024)
        for peer in (0, 2):
            areas.part(RANK if push else peer, number, peer, parts[peer]).copy_(parts[peer])
            for program in range(programs):
                areas.flag(RANK, peer, program).value = number
        total = areas.sum(parts[RANK], push, longest=0)
        assert torch.equal(total, sum_in_order(parts))
        for peer in (0, 2):
            told = [areas.flag(peer, RANK, program).value for program in range(programs)]
            assert told == [number] * programs
            assert areas.flag(peer, RANK, programs).value < number
            place = areas.part(peer if push else RANK, number, RANK, parts[RANK])
            assert torch.equal(place, parts[RANK])
        assert areas.word(RANK, state_at(COUNTER)).value == number
        assert areas.word(RANK, state_at(TICKETS)).value == 0
        assert areas.word(RANK, state_at(LATE)).value == 0


def test_a_rank_that_does_not_come_is_named_and_waits_are_bounded() -> None:
    areas = _Areas()
    areas.flag(RANK, 0, 0).value = 1
    areas.sum(torch.ones(8), push=True, longest=5)
    assert areas.word(RANK, state_at(LATE)).value == 1 + 2


def test_a_word_ends_all_waits() -> None:
    areas = _Areas()
    areas.word(RANK, state_at(ABORT)).value = 1
    areas.sum(torch.ones(8), push=False, longest=2**31 - 1)
    assert areas.word(RANK, state_at(LATE)).value != 0


def test_a_group_opens_its_areas_and_tells_who_was_late() -> None:
    world = World(2, deadline_s=20.0)
    queues = [CpuQueue(), CpuQueue()]

    def body(group: Group) -> None:
        host = join_host_memory(world, group.rank)
        made = OneShot(
            queues[group.rank],
            JitLauncher((9, 0), 132),
            host,
            push=True,
            deadline_s=1.0,
            slot_bytes=1024,
        )
        assert made.takes(torch.ones(256)) and not made.takes(torch.ones(257))
        assert not made.takes(torch.ones(4, dtype=torch.int32))
        made.check()
        if group.rank == 0:  # alone: nobody is there to meet
            made.let_go()
            assert made.all_reduce(torch.ones(2, 3)).shape == (2, 3)
            with pytest.raises(Stalled, match="rank 0 waited in a one-shot sum for rank 1"):
                made.check()
        made.close()
        host.close()

    run_ranks(virtual_groups(2), body)
    assert not any(queue.owned or queue.opened for queue in queues)
    world.close()
