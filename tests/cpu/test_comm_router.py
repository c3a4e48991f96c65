"""Contests between ways, and routes that follow from them: one decision, with its reasons."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from metainfer.comm.contenders import contenders_on_cpus
from metainfer.comm.contest import (
    Contender,
    Point,
    contest,
    floor_links,
    measure_links,
    rounded_up,
)
from metainfer.comm.device_memory import DeviceGroup
from metainfer.comm.group import Group, GroupError, sum_in_order
from metainfer.comm.host_memory import HostMemoryGroup, join_host_memory
from metainfer.comm.library import GLOO, LibraryGroup
from metainfer.comm.router import RoutedGroup, join_routed, join_routed_gpus, ways_of
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.comm.world import World
from metainfer.core.errors import MetainferError
from metainfer.hardware.curves import ALL_TO_ALL, COPY, LOAD, MEASURED_HERE, NCCL, RING, Curve
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.plan.foretold import foretold
from metainfer.plan.routes import DECODE, PREFILL, Rival, Router, route
from tests.fakes.cpu_queue import CpuQueue
from tests.fakes.rank_bodies import numbers

T = TypeVar("T")
SIZES = (1024, 2**14, 2**18)


def _with_shared_memory(size: int, body: Callable[[HostMemoryGroup], T]) -> list[T]:
    world = World(size, deadline_s=20.0, piece_bytes=2**16)
    try:
        return run_ranks(
            virtual_groups(size), lambda group: body(join_host_memory(world, group.rank))
        )
    finally:
        world.close()


def test_a_contest_verifies_all_and_tells_all_ranks_the_same() -> None:
    def body(group: HostMemoryGroup) -> list[Point]:
        ways = contenders_on_cpus(group, None, ("plain", "int8", "fp8"))
        return contest(group, ways, (1000,), 2, time.monotonic() + 30)

    first, *others = _with_shared_memory(4, body)
    assert all(points == first for points in others)
    assert [(p.operation, p.name) for p in first if p.operation == "all_reduce"] == [
        ("all_reduce", name)
        for name in (
            "one-shot", "two-shot", "ring", "two islands", "one-shot in int8", "two-shot in int8",
            "one-shot in fp8", "two-shot in fp8",
        )
    ]  # fmt: skip
    assert [p.name for p in first if p.operation == "reduce_scatter"] == [
        "shared memory", "shared memory in int8", "shared memory in fp8",
    ]  # fmt: skip
    assert not [point for point in first if point.wrong]
    assert all(len(point.seconds) == 2 and min(point.seconds) > 0 for point in first)
    assert {point.bytes for point in first} == {1024}


def test_a_way_that_brings_wrong_data_is_timed_no_more() -> None:
    def body(group: Group) -> list[Point]:
        def lies(tensor: torch.Tensor) -> torch.Tensor:
            found = group.all_reduce(tensor)
            found[0, 0] += 1 if group.rank == 1 else 0
            return found

        def differs(tensor: torch.Tensor) -> torch.Tensor:
            found = group.all_reduce(tensor)
            found[0, 0] += 0.5 * group.rank
            return found

        ways = [
            Contender("lies", "all_reduce", lies),
            Contender("differs", "all_reduce", differs, wire="int8"),
            Contender("works", "all_reduce", group.all_reduce),
        ]
        return contest(group, ways, SIZES, 1, time.monotonic() + 30)

    first, second = run_ranks(virtual_groups(2), body)
    assert first == second
    told = [(point.name, point.wrong) for point in first if point.wrong]
    assert told == [
        ("lies", "1 of 512 numbers of rank 1 are wrong"), ("differs", "ranks have different bits"),
    ]  # fmt: skip
    assert [point.bytes for point in first if point.seconds] == list(SIZES)
    told_ways = [(way.wire, way.rival.name) for way in ways_of(first)]
    assert told_ways == [("plain", "lies"), ("int8", "differs"), ("plain", "works")]
    lies, differs, works = (way.rival for way in ways_of(first))
    assert lies.why_not == "at 1.0 kB: 1 of 512 numbers of rank 1 are wrong"
    assert works.bytes == SIZES
    found = route("all_reduce", PREFILL, [lies, differs, works])
    assert found.choose(7) == "works"
    assert "not lies: at 1.0 kB: 1 of 512" in "\n".join(found.explain())


def test_nothing_is_begun_behind_the_end() -> None:
    def body(group: Group) -> list[Point]:
        ways = [Contender("works", "all_reduce", group.all_reduce)]
        return contest(group, ways, SIZES, 1, time.monotonic() - 1)

    assert run_ranks(virtual_groups(2), body) == [[], []]


EVERY_WAY = (
    "all_reduce: {} to 1024, then {}; all_gather: shared memory; reduce_scatter: shared memory;"
    " all_to_all: shared memory"
)


def _routed(size: int, router: Router, body: Callable[[RoutedGroup], T], wire: str) -> list[T]:
    """`body` on every rank of groups that are joined as an engine's are."""
    world = World(size, deadline_s=20.0, piece_bytes=2**16)
    try:
        return run_ranks(
            virtual_groups(size),
            lambda group: body(join_routed(world, group.rank, router, size, wire)),
        )
    finally:
        world.close()


@pytest.mark.parametrize("wire", ["plain", "int8", "fp8"])
def test_sums_have_the_same_bits_by_every_way_in_pieces_and_whole(wire: str) -> None:
    """Whichever way is chosen at whichever size; rows cut anywhere give what they give whole."""
    ways = ["one-shot", "two-shot"]
    if wire == "plain":
        ways += ["ring", "gloo, summed here"]
    parts = [numbers(rank, (37, 128), torch.bfloat16) for rank in range(3)]

    def body(group: RoutedGroup) -> list[torch.Tensor]:
        own = parts[group.rank]
        cut = [group.all_reduce(some.clone(), PREFILL) for some in own.split((1, 3, 33))]
        decoded = group.all_reduce(own.clone(), DECODE)
        return [group.all_reduce(own.clone(), PREFILL), torch.cat(cut), decoded]

    expected = run_ranks(
        virtual_groups(3, wire=wire), lambda group: group.all_reduce(parts[group.rank], PREFILL)
    )[0]
    for way in ways:
        for other in ("one-shot", "two-shot"):
            router = Router.of_words(EVERY_WAY.format(way, other))
            for whole, in_pieces, decoded in _routed(3, router, body, wire):
                assert torch.equal(whole, expected)
                assert torch.equal(in_pieces, expected)
                assert torch.equal(decoded, sum_in_order(parts))


@pytest.mark.parametrize("wire", ["plain", "fp8"])
def test_other_operations_and_parts_of_a_routed_group(wire: str) -> None:
    """Groups of as many ranks as the routes are for take them, too."""
    words = (
        "all_reduce: gloo, summed here; all_gather: gloo; reduce_scatter in decode: shared memory;"
        " reduce_scatter in prefill: gloo; all_to_all: gloo to 512, then shared memory"
    )
    parts = [numbers(rank, (8, 128), torch.float32) for rank in range(4)]
    world = World(4, deadline_s=20.0)

    def body(group: Group) -> list[torch.Tensor]:
        halves = group.part([0, 1] if group.rank < 2 else [2, 3])
        own = parts[group.rank]
        found = []
        for one in (group, halves, group.part([group.rank])):
            found += [
                one.all_reduce(own.clone(), PREFILL),
                one.all_gather(own),
                one.reduce_scatter(own, PREFILL),
                one.reduce_scatter(own),
                one.all_to_all(own),
            ]
        return found

    try:
        router = Router.of_words(words)
        found = run_ranks(
            virtual_groups(4), lambda group: body(join_routed(world, group.rank, router, 2, wire))
        )
    finally:
        world.close()
    expected = run_ranks(virtual_groups(4, wire=wire), body)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_way_that_brings_wrong_data_is_not_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(group: HostMemoryGroup, name: str, tensor: torch.Tensor, wire: str) -> torch.Tensor:
        found = sums(group, name, tensor, wire)
        return found + 1 if name == "ring" and group.rank == 1 else found

    sums = HostMemoryGroup.all_reduce_by
    monkeypatch.setattr(HostMemoryGroup, "all_reduce_by", lies)
    router = Router.of_words(EVERY_WAY.format("one-shot", "ring"))
    with pytest.raises(
        GroupError, match=r"all_reduce by ring brings wrong data at 1\.0 MB: \d+ of"
    ):
        _routed(2, router, lambda group: None, "plain")
    with pytest.raises(GroupError, match="there is no two islands for all_reduce here"):
        _routed(2, Router.of_words(EVERY_WAY.format("one-shot", "two islands")), id, "plain")


def test_words_give_the_routes_that_gave_them() -> None:
    words = (
        "all_reduce in decode: one-shot to 65536, then gloo, summed here; all_reduce in prefill:"
        " ring; all_gather: shared memory"
    )
    router = Router.of_words(words)
    assert router.words() == words
    assert router.choose("all_reduce", 65537, DECODE) == "gloo, summed here"
    assert router.choose("all_gather", 1, PREFILL) == "shared memory"
    for wrong in ("", "all_reduce", "all_reduce in sleep: ring", "all_reduce: ring to 10",
                  "all_reduce: ring, then ring to 10"):  # fmt: skip
        with pytest.raises(MetainferError, match="does not say which way"):
            Router.of_words(wrong)


def test_steps_go_by_bytes_and_change_only_for_a_gain() -> None:
    rivals = [
        Rival("small", (1, 10, 100, 1000), (1.0, 2.0, 30.0, 400.0)),
        Rival("large", (1, 10, 100, 1000), (5.0, 1.99, 20.0, 100.0)),
        Rival("copies", (1, 10, 100, 1000), (0.1, 0.1, 0.1, 0.1), phases=(PREFILL,)),
        Rival("library", (1, 10, 100, 1000), (0.2, 0.2, 0.2, 0.2), ordered=False),
    ]
    found = route("all_reduce", DECODE, rivals)
    assert [(step.up_to, step.name) for step in found.steps] == [(10, "small"), (None, "large")]
    assert [found.choose(size) for size in (0, 10, 11, 5000)] == [
        "small", "small", "large", "large",
    ]  # fmt: skip
    text = "\n".join(found.explain())
    assert "to 10 B: small (2.0 s, large 2.0 s)" in text
    assert "not copies: cannot be taken in decode" in text
    assert "not library: its sums depend on how the work is divided" in text
    assert route("all_reduce", PREFILL, rivals).choose(1) == "copies"


def test_no_way_left_is_told_with_all_reasons() -> None:
    rivals = [Rival("one", (), ()), Rival("two", (), (), why_not="wrong data")]
    with pytest.raises(MetainferError, match=r"two: wrong data; one: was not measured"):
        route("all_reduce", DECODE, rivals)
    with pytest.raises(MetainferError, match="no route for send"):
        Router([]).choose("send", 1, DECODE)


def _curve(
    means: str, operation: str, gpus: tuple[int, ...], per_s: float, start_s: float = 1e-5
) -> Curve:
    sizes = (1024, 2**20)
    seconds = tuple(start_s + size / per_s for size in sizes)
    return Curve(means, operation, gpus, True, sizes, seconds, True, MEASURED_HERE)


def test_a_machine_foretells_by_its_links() -> None:
    four = (0, 1, 2, 3)
    curves = [
        _curve(LOAD, ALL_TO_ALL, four, 20e9),
        _curve(COPY, ALL_TO_ALL, four, 50e9),
        _curve(NCCL, "all_reduce", four, 5e9),
        _curve(NCCL, "all_gather", four, 10e9, 4e-5),
        _curve(NCCL, "reduce_scatter", four, 10e9, 4e-5),
        _curve(LOAD, RING, (0, 1), 30e9),
        _curve(NCCL, "all_reduce", (0, 1), 5e9),
    ]
    found = {rival.name: rival for rival in foretold(curves, four, "all_reduce")}
    assert list(found) == [
        "NCCL", "NCCL, summed here", "one kernel by peer load", "one-shot by peer load",
        "two-shot by peer load", "one-shot by copy engine", "two-shot by copy engine",
    ]  # fmt: skip
    place = found["two-shot by peer load"].bytes.index(2**18)
    assert found["two-shot by peer load"].seconds[place] == pytest.approx(
        2 * (1e-5 + 0.75 * 2**18 / 20e9)
    )
    assert found["NCCL, summed here"].seconds[place] == pytest.approx(8e-5 + 1.25 * 2**18 / 10e9)
    assert found["one kernel by peer load"].bytes[-1] == 2**18
    decode = route("all_reduce", DECODE, list(found.values()))
    assert decode.choose(1024) == "one kernel by peer load"
    assert decode.choose(2**18 + 1) == "NCCL, summed here"
    assert "NCCL" in dict(decode.refused)  # its sums are in an order of its own
    assert route("all_reduce", PREFILL, list(found.values())).choose(2**18).endswith("copy engine")
    coded = foretold(curves, four, "all_reduce", 0.5)
    assert "NCCL" not in [rival.name for rival in coded]
    assert coded[1].seconds[place] == pytest.approx(1e-5 + 3 * 2**17 / 20e9)
    pair = foretold(curves, (0, 1), "all_gather")
    assert [rival.name for rival in pair] == ["direct by peer load"]
    assert foretold(curves, (0, 1), "all_reduce")[0].ordered  # two numbers have one order


WAYS_OF_GPUS = (
    "all_reduce in decode: NCCL, summed here; all_reduce in prefill: one-shot by host staged to"
    " 4096, then two-shot by copy engine; all_gather in decode: NCCL; all_gather in prefill: direct"
    " by copy engine; reduce_scatter in decode: NCCL; reduce_scatter in prefill: direct by host"
    " staged; all_to_all: NCCL"
)


@pytest.mark.parametrize("wire", ["plain", "int8"])
def test_gpus_take_ways_that_differ_from_size_to_size(wire: str) -> None:
    """Queues are simulated, and gloo is in NCCL's place. Groups of half the ranks have routes."""
    parts = [numbers(rank, (40, 128), torch.bfloat16) for rank in range(4)]
    queues = [CpuQueue() for _ in parts]
    world = World(4, deadline_s=20.0, piece_bytes=2**16)

    def body(group: Group) -> list[torch.Tensor]:
        own = parts[group.rank]
        halves = group.part([0, 1] if group.rank < 2 else [2, 3])
        found = []
        for one in (halves, group):
            found += [
                one.all_reduce(own.clone()), one.all_reduce(own.clone(), PREFILL),
                one.all_reduce(own[:3].clone(), PREFILL), one.all_gather(own, PREFILL),
                one.reduce_scatter(own, PREFILL), one.all_to_all(own),
            ]  # fmt: skip
        return found

    def on_gpu(group: Group) -> list[torch.Tensor]:
        routed = join_routed_gpus(
            world, group.rank, Router.of_words(WAYS_OF_GPUS), 2, wire,
            lambda: queues[group.rank], lambda: JitLauncher((9, 0), 132), GLOO,
        )  # fmt: skip
        found = body(routed)
        routed.close()
        return found

    try:
        found = run_ranks(virtual_groups(4), on_gpu)
    finally:
        world.close()
    expected = run_ranks(virtual_groups(4, wire=wire), body)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours[:6], theirs[:6], strict=True):
            assert torch.equal(one, other)
    assert all(queue.log for queue in queues)


def test_a_gpu_whose_way_brings_wrong_data_takes_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lies(group: DeviceGroup, name: str, tensor: torch.Tensor, wire: str) -> torch.Tensor:
        return sums(group, name, tensor, wire) + 1

    sums = DeviceGroup.all_reduce_by
    monkeypatch.setattr(DeviceGroup, "all_reduce_by", lies)
    world = World(2, deadline_s=20.0)
    words = WAYS_OF_GPUS.replace("one-shot by host staged to 4096, then ", "")

    def body(group: Group) -> torch.Tensor:
        routed = join_routed_gpus(
            world, group.rank, Router.of_words(words), 2, "plain", CpuQueue,
            lambda: JitLauncher((9, 0), 132), GLOO,
        )  # fmt: skip
        return routed.all_reduce(torch.full((4, 128), 1.0 + group.rank), PREFILL)

    try:
        for found in run_ranks(virtual_groups(2), body):
            assert torch.equal(found, torch.full((4, 128), 3.0))
    finally:
        world.close()
    (said,) = caplog.messages
    assert "all_reduce by two-shot by copy engine brings wrong data at 1.0 MB" in said
    assert said.endswith("; NCCL stands in for it")


def test_gpus_without_curves_have_nccl_alone() -> None:
    world, nccl = World(2, deadline_s=20.0), "all_reduce: NCCL; all_gather: NCCL"

    def body(group: Group) -> bool:
        joined = join_routed_gpus(
            world, group.rank, Router.of_words(nccl), 2, "plain", _none, _none, GLOO
        )
        return isinstance(joined, LibraryGroup)

    try:
        assert run_ranks(virtual_groups(2), body) == [True, True]
    finally:
        world.close()


def _none() -> Any:
    raise AssertionError("nothing else is made")


def test_floors_are_of_bytes_that_must_come_from_others() -> None:
    assert floor_links("all_reduce", 1000, 4) == 1500
    assert floor_links("all_gather", 1000, 4) == 3000
    assert floor_links("reduce_scatter", 1000, 4) == 750
    assert rounded_up(1, 3) == 768
    links = _with_shared_memory(2, lambda group: measure_links(group, copied=2**14, samples=1))
    assert links[0] == links[1]
    assert links[0].floor_s("all_reduce", 2048, 2) > links[0].flag_s > 0
