"""Ranks that are threads: what they sum and move, and a rank that fails or comes late."""

from __future__ import annotations

import threading

import pytest
import torch

from metainfer.comm.group import Aborted, Group, GroupError, Solo, Stalled, sum_in_order
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.core.errors import MetainferError


def _values(rank: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 5, generator=made).mul_(10.0 ** (rank % 3)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_those_of_fp32_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    rows = 2 * size
    wanted = torch.stack([_values(rank, rows, dtype) for rank in range(size)])
    summed = wanted[0].float()
    for part in wanted[1:]:
        summed = summed + part.float()

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            group.all_reduce(_values(group.rank, rows, dtype)),
            group.reduce_scatter(_values(group.rank, rows, dtype)),
        )

    for rank, (whole, own) in enumerate(run_ranks(virtual_groups(size), body)):
        assert torch.equal(whole, summed.to(dtype))
        assert torch.equal(own, summed.to(dtype)[2 * rank : 2 * rank + 2])


def test_whole_numbers_are_summed_as_whole_numbers() -> None:
    big = torch.tensor([2**30 + 1])
    assert sum_in_order([big, big]).item() == 2**31 + 2


def test_rows_move_as_they_are() -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.arange(4, dtype=torch.uint8).view(2, 2) + 10 * group.rank
        return group.all_gather(own), group.all_to_all(own)

    (first, dealt), (second, dealt_1) = run_ranks(virtual_groups(2), body)
    assert first.tolist() == second.tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert dealt.tolist() == [[0, 1], [10, 11]]
    assert dealt_1.tolist() == [[2, 3], [12, 13]]


def test_what_is_sent_may_be_overwritten_and_arrives_in_order() -> None:
    def body(group: Group) -> list[float]:
        if group.rank == 0:
            tensor = torch.zeros(1)
            for number in range(3):
                tensor.fill_(number)
                group.send(tensor, 1)
            return []
        return [group.receive(torch.empty(1), 0).item() for _ in range(3)]

    assert run_ranks(virtual_groups(2), body)[1] == [0.0, 1.0, 2.0]


def test_objects_go_to_rank_0_and_come_from_it() -> None:
    def body(group: Group) -> tuple[list[str] | None, str]:
        return group.gather(f"of {group.rank}"), group.broadcast(f"from {group.rank}")

    assert run_ranks(virtual_groups(2), body) == [
        (["of 0", "of 1"], "from 0"),
        (None, "from 0"),
    ]


def test_parts_work_at_the_same_time_and_again() -> None:
    def body(group: Group) -> tuple[float, float, int]:
        pair = group.part([0, 1] if group.rank < 2 else [2, 3])
        across = group.part([0, 2] if group.rank % 2 == 0 else [3, 1])
        one = torch.tensor([float(group.rank)])
        return pair.all_reduce(one).item(), across.all_reduce(one).item(), across.rank

    assert run_ranks(virtual_groups(4), body) == [
        (1.0, 2.0, 0), (1.0, 4.0, 1), (5.0, 2.0, 1), (5.0, 4.0, 0),
    ]  # fmt: skip


def test_a_rank_that_fails_ends_all_with_its_error() -> None:
    ended: list[type] = []

    def body(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("no such expert")
        try:
            group.all_reduce(torch.ones(1))
        except Aborted as error:
            ended.append(type(error.__cause__))
            raise

    with pytest.raises(ValueError, match="no such expert"):
        run_ranks(virtual_groups(3), body)
    assert ended == [ValueError, ValueError]


def test_a_late_rank_is_named_with_the_operation() -> None:
    leave = threading.Event()

    def body(group: Group) -> None:
        if group.rank == 1:
            leave.wait(10)
            return
        try:
            group.all_gather(torch.ones(2))
        finally:
            leave.set()

    with pytest.raises(Stalled, match=r"all_gather of float32 \[2\] for rank 1"):
        run_ranks(virtual_groups(2, deadline_s=0.05), body)


def test_ranks_that_call_different_things_are_told() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(2))
        else:
            group.all_gather(torch.ones(2))

    with pytest.raises(GroupError, match=r"all_gather of float32 \[2\]"):
        run_ranks(virtual_groups(2), body)


def test_a_group_of_one_is_the_identity_and_has_nobody_to_talk_to() -> None:
    alone, tensor = Solo(), torch.arange(4.0)
    assert alone.all_reduce(tensor) is tensor
    assert alone.reduce_scatter(tensor) is tensor
    assert alone.part([0]) is alone
    with pytest.raises(MetainferError, match="alone"):
        alone.send(tensor, 1)
    with pytest.raises(MetainferError, match="no part"):
        alone.part([0, 1])
