"""Checks of the record itself: values that no machine has, or that contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.doctor.checks import record
from metainfer.doctor.finding import Patient
from metainfer.hardware.curves import COPY, FROM_HOST, NCCL, STORE, Curve, Rate
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_names, machine_of
from metainfer.hardware.machine import Clocks, Machine, NumaNode, Power, Process
from metainfer.hardware.pcie import PcieLink, Peer

BOX = machine_of("rtx-pro-6000-x8")
MIB = 2**20


def first(**changes) -> Machine:
    assert not isinstance(BOX.gpus, Unknown)
    return replace(BOX, gpus=(replace(BOX.gpus[0], **changes), *BOX.gpus[1:]))


def measured(*curves: Curve) -> Machine:
    return replace(BOX, curves=curves)


def curve(means: str, operation: str, *points: tuple[int, float], gpus=(0, 1), at_once=False):
    sizes, times = zip(*points, strict=True)
    return Curve(means, operation, gpus, at_once, sizes, times, True, "measured here")


@pytest.mark.parametrize("name", machine_names())
def test_recorded_machines_are_possible(name: str):
    for check in record.CHECKS:
        assert [str(f.level) for f in check.examine(Patient(machine_of(name)))] == ["ok"]


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        (first(link=PcieLink(5, 16, 4, 16)), "generation 5, possible 4"),
        (first(link=PcieLink(5, 16, 5, 8)), "width 16, possible 8"),
        (first(link=PcieLink(5, 7, 5, 16)), "7 lanes"),
        (first(link=PcieLink(5, 32, 5, 32)), "32 of 16"),
        (first(link=PcieLink(6, 16, 6, 16)), "generation 6; RTX PRO 6000: 5"),
        (first(capability=(9, 0)), "9.0; RTX PRO 6000: 12.0"),
        (first(multiprocessors=400), "400; 188"),
        (first(shared_block_bytes=232448), "232,448 bytes"),
        (first(memory_bytes_per_s=8e12), "8,000 GB/s"),
        (first(clocks=Clocks(9000, 1000, 3000, 14000)), "9000 of 3000 MHz"),
        (first(power=Power(300.0, 600.0, 900.0)), "900 of 300 W"),
        (measured(curve(COPY, "copy", (MIB, 1e-4), (4 * MIB, 7e-5))), "4.2 MB 70 us"),
        (measured(curve(COPY, "copy", (64 * MIB, 5e-4))), "134.2 GB/s"),
        (measured(curve(FROM_HOST, "copy", (64 * MIB, 5e-4), gpus=(0,))), "134.2 GB/s"),
        (measured(curve(NCCL, "all_reduce", (64 * MIB, 1.2e-3), gpus=tuple(range(8)))), "97.9"),
        (replace(BOX, rates=(Rate("product fp8", 8192, 2e15, "measured here"),)), "nominal 935"),
        (replace(BOX, rates=(Rate("product bf16", 8192, 2e15, "measured here"),)), "nominal 467"),
        (replace(BOX, rates=(Rate("copy", 0, 4e12, "measured here"),)), "4.0 TB/s"),
        (replace(BOX, rates=(Rate("experts fp4", 8192, 3e15, "measured here"),)), "1,871"),
    ],
)
def test_what_no_card_or_link_can_be_fails(machine: Machine, word: str):
    found = list(record.impossible(Patient(machine)))
    assert {str(one.level) for one in found} == {"fail"}
    assert all(one.evidence and one.matters and one.fix for one in found)
    assert any(word in one.evidence for one in found)


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        (first(parent="nowhere"), "a bridge that the record does not list"),
        (replace(first(numa_node=7), host=replace(BOX.host, numa_nodes=(
            NumaNode(0, (0,), MIB), NumaNode(1, (1,), MIB)))), "does not have"),
        (replace(BOX, nvlink=True, curves=()), "no NVLink"),
        (replace(BOX, peers=(Peer(0, 1, True), Peer(0, 1, False))), "both there and refused"),
        (replace(BOX, peers=(Peer(2, 2, True),)), "its own peer"),
        (replace(measured(curve(STORE, "copy", (MIB, 1e-4))), peers=(Peer(0, 1, False),)),
         "a curve went over it"),
        (replace(BOX, memory=replace(BOX.memory, total_bytes=10, available_bytes=11)),
         "more host memory"),
        (replace(BOX, cpu=replace(BOX.cpu, physical_cores=9, logical_cores=8)), "fewer threads"),
        (first(processes=(Process(1, "python", 2**40),)), "hold more of GPU 0"),
        (measured(curve(COPY, "copy", (MIB, 1e-4)), curve(COPY, "copy", (MIB, 5e-5), at_once=True)),
         "faster with all at once"),
    ],
)  # fmt: skip
def test_contradictions_are_warnings(machine: Machine, word: str):
    found = [f for f in record.contradicting(Patient(machine)) if word in f.what]
    assert [str(f.level) for f in found] == ["warn"] and found[0].fix


def test_published_curves_do_not_hold_over_lesser_links():
    lesser = first(link=PcieLink(5, 8, 5, 16))
    assert [str(f.level) for f in record.impossible(Patient(lesser))] == ["ok"]
    found = list(record.contradicting(Patient(lesser)))
    assert found and all(f.level == "warn" and "faster than the wire" in f.what for f in found)


def test_noise_of_few_bytes_and_unlisted_cards_are_left_alone():
    noisy = measured(curve(COPY, "copy", (1024, 9e-6), (2048, 5e-6), (MIB, 1e-4)))
    assert next(record.impossible(Patient(noisy))).level == "ok"
    odd = first(name="NVIDIA Something", capability=(12, 1), memory_bytes_per_s=9e12)
    odd = replace(odd, rates=(Rate("product fp8", 8192, 9e15, "measured here"),))
    assert next(record.impossible(Patient(odd))).level == "ok"
    for check in record.CHECKS:
        assert not list(check.examine(Patient(replace(BOX, gpus=Unknown("no driver")))))
