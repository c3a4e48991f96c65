"""Trials that are chosen for a machine, and what is kept and said of what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.cli.machine_text import machine_lines
from metainfer.comm.measure_trials import HOST_LINKS, SHARES, Trial, crossing, trials_of
from metainfer.hardware.curves import (
    ALL_TO_ALL,
    COPY,
    LOAD,
    NCCL,
    PULL,
    RING,
    SEVERAL_ROOTS,
    STAGED,
    STORE,
    Curve,
    trusted,
)
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Gpu
from metainfer.hardware.measured import (
    Measured,
    conditions,
    read_measured,
    sentences,
    with_measured,
    write_measured,
)
from metainfer.hardware.pcie import Peer
from tests.fakes.command import metainfer
from tests.fakes.machines import GIB, make_machine, two_sockets

CARD = Gpu("a card", (12, 0), 96 * GIB, 95 * GIB)


def pairs_of(trials: tuple[Trial, ...], means: str) -> set[tuple[int, ...]]:
    return {t.gpus for t in trials if t.means == means and t.operation == "copy"}


def test_few_cards_have_all_pairs_and_many_their_neighbours_and_each_kind_of_way():
    assert len(pairs_of(trials_of(make_machine(gpus=(CARD,) * 4), range(4)), STORE)) == 12
    machine = two_sockets()
    pairs = pairs_of(trials_of(machine, range(5)), STORE)
    assert {(n, (n + 1) % 5) for n in range(5)} <= pairs and len(pairs) < 20
    assert {(0, 1), (0, 2), (0, 4)} <= pairs  # PIX, NODE, SYS


def test_one_card_has_its_host_alone_and_both_ways_at_once():
    trials = trials_of(make_machine(gpus=(CARD,)), (0,))
    assert [(t.means, t.at_once, len(t.flows)) for t in trials] == [
        ("to host", False, 1), ("from host", False, 1), ("to host", True, 2),
        ("from host", True, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ("rtx-pro-6000-x8", "l40s-x8", "rtx-pro-6000-x4"))
def test_all_of_a_recorded_machine_is_asked_for(name):
    machine = machine_of(name)
    count = len(machine.gpus)
    trials = trials_of(machine, range(count))
    assert {trial.part for trial in trials} == set(SHARES)
    operations = {(t.means, t.operation) for t in trials}
    for means in (STORE, LOAD, COPY):
        assert {(means, RING), (means, ALL_TO_ALL), (means, SEVERAL_ROOTS)} <= operations
    assert (COPY, PULL) in operations and (STAGED, RING) in operations
    groups = {t.gpus for t in trials if t.means == NCCL and t.operation == "all_reduce"}
    assert groups == {tuple(range(n)) for n in (2, 4, 8) if n <= count}
    for trial in trials:
        for size in trial.bytes if trial.flows else ():
            each = trial.flow_bytes(size)
            sources = [flow.source for flow in trial.flows]
            assert each % 64 == 0 and each > 0
            assert each * max(map(sources.count, sources)) <= max(size, 64 * len(sources)) or (
                "host" in trial.means
            )
            slots = {(flow.target, trial.slot_in(flow)[1]) for flow in trial.flows}
            assert len(slots) == len(trial.flows)


def test_several_roots_are_written_to_from_the_other_half():
    found = crossing(two_sockets(), range(5))
    assert {source for source, _ in found} == {0, 1}
    assert {target for _, target in found} == {2, 3, 4}
    assert not crossing(two_sockets(), range(2))


def test_pairs_that_the_driver_denies_go_through_the_host():
    peers = (Peer(0, 1, False, "not supported"), Peer(1, 0, False, "not supported"))
    machine = replace(make_machine(gpus=(CARD,) * 2), peers=peers)
    means = {trial.means for trial in trials_of(machine, range(2)) if trial.part != HOST_LINKS}
    assert means == {STAGED, NCCL}
    all_but_one = trials_of(replace(machine, gpus=(CARD,) * 3), range(3))
    assert (0, 2) in pairs_of(all_but_one, STORE) and (0, 1) not in pairs_of(all_but_one, STORE)
    assert not [t for t in all_but_one if t.operation == RING and t.means == STORE]


def curve(means: str, operation: str, rate: float, **more) -> Curve:
    made = Curve(means, operation, (0, 1), operation != "copy", (2**20,), (2**20 / rate,), True,
                 "measured here")  # fmt: skip
    return replace(made, **more)


MEASURED = (
    curve(STORE, SEVERAL_ROOTS, 3e9),
    curve(LOAD, SEVERAL_ROOTS, 25e9),
    curve(STORE, "copy", 50e9),
    curve(LOAD, "copy", 27e9),
    curve(
        COPY, "copy", 55e9, verified=False, bytes=(), seconds=(), source="measured here: at 1 kB"
    ),
)


def test_what_is_kept_counts_for_the_same_conditions_alone(tmp_path):
    machine = make_machine(gpus=(CARD,) * 2)
    assert read_measured(make_machine(), tmp_path) == "the machine has no GPU"
    assert read_measured(machine, tmp_path) == "nothing was measured yet"
    assert with_measured(machine, tmp_path) is machine
    found = Measured("2026-01-31", *conditions(machine), MEASURED, (), ("peer load: no",))
    path = write_measured(machine, found, tmp_path)
    assert read_measured(machine, tmp_path) == found
    assert with_measured(machine, tmp_path) == found.of(machine) != machine
    for changed in ({"versions": {"torch": "3"}}, {"environment": {"NCCL_PROTO": "LL"}}):
        why = read_measured(replace(machine, **changed), tmp_path)
        assert isinstance(why, str) and "is of another" in why
    other = replace(machine, driver="580.1")
    assert read_measured(other, tmp_path) == "nothing was measured yet"
    for spoilt in ("{", '{"version": 1, "date": 3}', '{"version": 1}'):
        path.write_text(spoilt)
        assert "cannot be read" in str(read_measured(machine, tmp_path))
    kept = write_measured(machine, found, tmp_path).read_text()
    for right, wrong in (('"gpus": [\n    0,', '"gpus": [\n    7,'), ("1048576", "-1")):
        assert right in kept
        path.write_text(kept.replace(right, wrong))
        assert "cannot be read" in str(read_measured(machine, tmp_path))
    path.write_text("[" * 10**5)
    assert "cannot be read" in str(read_measured(machine, tmp_path))
    path.write_text("[1]")
    assert read_measured(machine, tmp_path) == "what is kept is of another version"


def test_curves_say_what_they_show_and_wrong_ones_are_not_counted_with():
    machine = replace(make_machine(gpus=(CARD,) * 2), curves=MEASURED, unmeasured=("that: why",))
    assert sentences(machine) == [
        "copy engine, copy over 0,1: wrong data arrives, so it is not used (at 1 kB)",
        "stores to several roots collapse: 3.0 GB/s where loads make 25.0",
        "kernels, one pair: push 50.0 GB/s, pull 27.0 (the slowest of 1)",
    ]
    assert trusted(MEASURED) == MEASURED[:-1]
    lines = machine_lines(machine)
    assert "not measured that: why" in lines and max(map(len, lines)) <= 100
    published = replace(MEASURED[-1], source="a wiki", bytes=(1,), seconds=(1.0,))
    assert published.trusted


def test_measuring_without_gpus_says_so_and_needs_the_machine_itself():
    ran = metainfer("probe", "--measure")
    assert ran.code == 0 and "nothing is measured: no GPU is known here" in ran.err
    for wrong in (("--measure", "--machine", "l40s-x8"), ("--fresh",)):
        ran = metainfer("probe", *wrong)
        assert ran.code == 2 and "hint" in ran.err
