"""Checks of curves and of NCCL, on recorded machines as they are and made sick."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.doctor.checks import fabric, links, nccl
from metainfer.doctor.finding import Finding, Patient
from metainfer.hardware.curves import (
    COPY,
    LOAD,
    MEASURED_HERE,
    NCCL,
    PULL,
    SEVERAL_ROOTS,
    STAGED,
    STORE,
    Curve,
)
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_names, machine_of
from metainfer.hardware.machine import Host, Machine
from metainfer.hardware.pcie import PcieLink

SIZES = (1024, 2**20, 2**28)
V4 = read_shape("deepseek-v4-flash")


def curve(means: str, per_s: float, *, operation: str = "copy", gpus=(0, 1), **changes) -> Curve:
    """Of a rate, with 1 us to start."""
    seconds = tuple(1e-6 + size / per_s for size in SIZES)
    given = Curve(means, operation, gpus, False, SIZES, seconds, True, MEASURED_HERE)
    return replace(given, **changes)


def with_curves(name: str, *curves: Curve) -> Machine:
    return replace(machine_of(name), curves=curves)


def found(check, machine: Machine, shape=None) -> list[Finding]:
    return list(check(Patient(machine, shape=shape)))


def levels(findings: list[Finding]) -> list[str]:
    return [str(finding.level) for finding in findings]


def test_wrong_payloads_fail_even_where_no_size_was_right():
    wrong = curve(STORE, 50e9, verified=False, bytes=(), seconds=())
    machine = with_curves("rtx-pro-6000-x4", wrong, curve(COPY, 54e9))
    (finding,) = found(fabric.payload, machine)
    assert finding.level == "fail" and "GPU 0 to 1" in finding.evidence
    for module in (fabric, nccl):  # nobody counts with such a curve, or stumbles over it
        for check in module.CHECKS:
            list(check.examine(Patient(machine, shape=V4)))
    assert levels(found(fabric.payload, with_curves("rtx-pro-6000-x4", curve(COPY, 5e10)))) == [
        "ok"
    ]
    # Published curves were not verified here: nothing is known, nothing is wrong.
    assert levels(found(fabric.payload, machine_of("rtx-pro-6000-x4"))) == ["unknown"]


def test_peer_access_that_cards_do_not_come_with_is_not_believed():
    machine = machine_of("rtx-4090-x4")
    assert not isinstance(machine.peers, Unknown)
    patched = replace(machine, peers=tuple(replace(p, p2p=True, why="") for p in machine.peers))
    (finding,) = found(fabric.payload, patched)
    assert finding.level == "warn" and "NCCL_P2P_DISABLE=1" in finding.fix
    assert levels(found(fabric.payload, replace(patched, curves=(curve(COPY, 26e9),)))) == ["ok"]


@pytest.mark.parametrize(("loads", "level"), [(43e9, "ok"), (20e9, "warn"), (3e9, "fail")])
def test_loads_of_kernels_are_held_against_copies(loads: float, level: str):
    machine = with_curves("rtx-pro-6000-x4", curve(COPY, 54e9), curve(LOAD, loads))
    (finding,) = found(fabric.kernels, machine)
    assert finding.level == level
    if level == "fail":
        assert "ForceP2P" in finding.fix and "18 times as long" in finding.matters


def test_one_bad_pair_is_found_among_sound_ones():
    pairs = ((0, 1), (2, 3))
    copies = (curve(COPY, 54e9, gpus=pair) for pair in pairs)
    loads = (curve(LOAD, per_s, gpus=pair) for per_s, pair in zip((45e9, 3e9), pairs, strict=True))
    (finding,) = found(fabric.kernels, with_curves("rtx-pro-6000-x4", *copies, *loads))
    assert finding.level == "fail" and "from GPU 2 to 3" in finding.evidence


def test_writes_collapse_on_the_box_that_is_known_for_it_and_hold_up_elsewhere():
    (sick,) = found(fabric.collapse, machine_of("rtx-pro-6000-x8-two-sockets"))
    assert sick.level == "fail" and "16%" in sick.what and "pull" in sick.fix
    assert levels(found(fabric.collapse, machine_of("rtx-pro-6000-x8"))) == ["ok"]
    assert levels(found(fabric.collapse, machine_of("rtx-pro-6000-x4"))) == ["ok", "ok"]


def test_writes_to_several_roots_are_held_against_reads():
    def roots(means: str, per_s: float) -> Curve:
        return curve(means, per_s, operation=SEVERAL_ROOTS, gpus=tuple(range(8)), at_once=True)

    name = "rtx-pro-6000-x8"
    sick = with_curves(name, roots(STORE, 2.7e9), roots(LOAD, 51e9))
    assert levels(found(fabric.collapse, sick)) == ["fail"]
    assert levels(found(fabric.collapse, with_curves(name, roots(STORE, 4e10),
                                                     roots(LOAD, 5e10)))) == ["ok"]  # fmt: skip


def test_pull_is_told_from_push():
    name = "rtx-pro-6000-x2"
    slow = with_curves(name, curve(COPY, 20e9), curve(COPY, 50e9, operation=PULL))
    (finding,) = found(fabric.pull, slow)
    assert finding.level == "warn" and "target" in finding.what and "pull" in finding.fix
    even = with_curves(name, curve(COPY, 50e9), curve(COPY, 52e9, operation=PULL))
    assert levels(found(fabric.pull, even)) == ["ok"]
    assert not found(fabric.pull, machine_of(name))


def test_crossing_links_and_latency():
    (crossing,) = found(fabric.crossing, machine_of("l40s-x8"))
    assert crossing.level == "warn" and "37%" in crossing.what
    assert levels(found(fabric.crossing, machine_of("rtx-6000d-x8"))) == ["ok"]
    copies = (curve(COPY, 54e9), curve(COPY, 51e9, gpus=(3, 4)))
    staged = curve(STAGED, 9e9, gpus=(3, 4))
    both = with_curves("rtx-6000d-x8", *copies, staged)
    assert levels(found(fabric.crossing, both)) == ["ok"]  # another means is no slow crossing
    slow = with_curves("rtx-pro-6000-x2", curve(COPY, 30e9))
    assert levels(found(fabric.wire, slow)) == ["warn"]
    for name in ("rtx-pro-6000-x2", "l40s-x4", "rtx-6000d-x8"):
        assert levels(found(fabric.wire, machine_of(name))) == ["ok"]
    far = curve(STORE, 5e10, seconds=(14e-6, 40e-6, 6e-3))
    (finding,) = found(fabric.latency, with_curves("rtx-pro-6000-x2", far), V4)
    assert finding.level == "warn" and "86 times a token: 1.2 ms" in finding.matters
    assert levels(found(fabric.latency, with_curves("rtx-pro-6000-x2", curve(LOAD, 4e10)))) == [
        "ok"
    ]


def test_the_driver_key_is_asked_for_at_root_ports_alone():
    name = "rtx-6000d-x8"
    assert levels(found(fabric.registry, machine_of(name))) == ["unknown"]
    for state, level in ((False, "warn"), (True, "ok")):
        machine = replace(machine_of(name), host=Host(relaxed_p2p=state))
        assert levels(found(fabric.registry, machine)) == [level]
    measured = with_curves(name, curve(COPY, 54e9), curve(LOAD, 45e9))
    for machine in (measured, machine_of("l40s-x8"), machine_of("rtx-5070ti-x2")):
        assert not found(fabric.registry, machine)


def cpu(machine: Machine, model: str, **environment: str) -> Machine:
    return replace(machine, cpu=replace(machine.cpu, model=model), environment=environment)


def test_the_peer_level_depends_on_tree_processor_and_variable():
    machine = machine_of("rtx-6000d-x8")
    assert levels(found(nccl.level, machine)) == ["unknown"]
    for model, variables, level in (
        ("Intel Xeon 6760P", {}, "warn"),
        ("Intel Xeon 6760P", {"NCCL_P2P_LEVEL": "SYS"}, "ok"),
        ("Intel Xeon 6760P", {"NCCL_P2P_LEVEL": "4"}, "ok"),  # its old number
        ("Intel Xeon 6760P", {"NCCL_P2P_LEVEL": "NODE"}, "warn"),  # no level of NCCL
        ("Intel Xeon 6760P", {"NCCL_P2P_LEVEL": "PHB"}, "warn"),  # not across sockets
        ("AMD EPYC 9575F", {}, "ok"),
        ("AMD EPYC 9575F", {"NCCL_P2P_LEVEL": "PIX"}, "warn"),
    ):
        assert levels(found(nccl.level, cpu(machine, model, **variables))) == [level], model
    assert not found(nccl.level, machine_of("b300-x8"))
    assert not found(nccl.level, machine_of("rtx-5070ti-x2"))


def test_the_default_ring_of_l40s_is_a_failure_worth_a_number():
    (finding,) = found(nccl.bus, machine_of("l40s-x8"), V4)
    assert finding.level == "fail" and "6%" in finding.what
    assert "input tok/s" in finding.matters and "TP8" in finding.matters
    fast = curve(NCCL, 0.57 * 40e9, operation="all_reduce", gpus=tuple(range(8)))
    assert levels(found(nccl.bus, with_curves("rtx-6000d-x8", fast))) == ["ok"]


def test_without_peer_access_nccl_is_held_against_copies_through_the_host():
    (finding,) = found(nccl.bus, machine_of("rtx-5070ti-x2"))
    assert finding.level == "fail" and "pipeline" in finding.fix


def test_the_constant_of_amd_hosts_matters_where_links_are_faster():
    (finding,) = found(nccl.host, machine_of("rtx-pro-6000-x8-two-sockets"))
    assert finding.level == "warn" and "2127" in finding.fix
    assert not found(nccl.host, machine_of("rtx-pro-6000-x8"))  # the processor is not named


def test_exchanges_of_a_decode_step_are_counted():
    (finding,) = found(nccl.decode, machine_of("rtx-6000d-x8"), V4)
    assert finding.level == "warn" and "86 exchanges" in finding.evidence
    assert not found(nccl.decode, machine_of("rtx-6000d-x8"))
    (staged,) = found(nccl.decode, machine_of("rtx-5070ti-x2"), V4)
    assert "without peer access" in staged.fix


def test_a_sick_link_is_worth_a_number():
    machine = machine_of("rtx-pro-6000-x8")
    assert not isinstance(machine.gpus, Unknown)

    def third(**changes) -> Machine:
        gpus = list(machine.gpus)
        gpus[3] = replace(gpus[3], **changes)
        return replace(machine, gpus=tuple(gpus))

    narrow = found(links.width, third(link=PcieLink(5, 8, 5, 16)), V4)[0]
    slow = found(links.generation, third(link=PcieLink(3, 16, 5, 16), utilisation=0.9), V4)
    (slow,) = [one for one in slow if one.level == "fail"]
    for finding in (narrow, slow):
        assert "TP8 reads at" in finding.matters and "input tok/s" in finding.matters
    assert "input tok/s" not in found(links.width, third(link=PcieLink(5, 8, 5, 16)))[0].matters


@pytest.mark.parametrize("name", machine_names())
def test_every_recorded_machine_can_be_examined(name: str):
    for module in (fabric, nccl):
        for check in module.CHECKS:
            for finding in check.examine(Patient(machine_of(name), shape=V4)):
                assert finding.what and finding.evidence
                assert finding.fix or finding.level in ("ok", "unknown")
