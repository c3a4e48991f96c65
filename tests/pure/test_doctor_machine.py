"""Checks of peers, cards and environment, on good and sick machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.doctor.checks import cards, environment, peers
from metainfer.doctor.finding import Finding, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Host, Machine, Power, Process
from metainfer.hardware.pcie import Peer
from metainfer.hardware.topology import way
from tests.fakes.machines import GIB, make_machine, two_sockets

PAIRS = [(a, b) for a in range(5) for b in range(5) if a != b]
WELL = replace(
    two_sockets(),
    peers=tuple(Peer(a, b, True) for a, b in PAIRS),
    host=Host(iommu="passthrough", hmm=False),
    nvlink=False,
)


def first(machine: Machine, **changes) -> Machine:
    assert not isinstance(machine.gpus, Unknown)
    return replace(machine, gpus=(replace(machine.gpus[0], **changes), *machine.gpus[1:]))


def said(check, machine: Machine) -> list[tuple[str, str]]:
    return [(str(f.level), f.what) for f in check(Patient(machine))]


def only(check, machine: Machine) -> Finding:
    (finding,) = [f for f in check(Patient(machine)) if f.level in ("warn", "fail")]
    assert finding.matters and finding.fix and finding.evidence
    return finding


def test_a_well_machine_gets_no_warning_but_for_its_sockets():
    for module in (peers, cards, environment):
        for check in module.CHECKS:
            bad = [f for f in check.examine(Patient(WELL)) if f.level in ("warn", "fail")]
            assert [f.check for f in bad] in ([], ["two sockets"])


def test_peers_that_are_refused_say_why_and_what_it_costs():
    refused = tuple(Peer(a, b, False, "the chipset does not support it") for a, b in PAIRS)
    finding = only(peers.peer_access, replace(WELL, peers=refused))
    assert "20 of 20" in finding.what and "chipset" in finding.evidence
    assert said(peers.peer_access, two_sockets())[0][0] == "unknown"
    silent = (Peer(0, 1, Unknown("no")), Peer(1, 0, True))
    assert said(peers.peer_access, replace(WELL, peers=silent)) == [
        ("unknown", "1 pairs are not known")
    ]


def test_access_control_names_the_bridges_to_change():
    assert not isinstance(WELL.bridges, Unknown)
    known = tuple(replace(bridge, acs_redirects=False) for bridge in WELL.bridges)
    assert said(peers.access_control, replace(WELL, bridges=known))[0][0] == "ok"
    sick = (*known[:1], replace(known[1], acs_redirects=True), *known[2:])
    finding = only(peers.access_control, replace(WELL, bridges=sick))
    assert finding.level == "fail" and "setpci -s switch a ECAP_ACS+6.w=0000" in finding.fix
    hidden = tuple(replace(b, acs_redirects=Unknown("administrator")) for b in known)
    assert said(peers.access_control, replace(WELL, bridges=hidden))[0][0] == "unknown"


@pytest.mark.parametrize(
    ("check", "machine", "word"),
    [
        (peers.iommu, replace(WELL, host=Host(iommu="translating")), "iommu=pt"),
        (peers.hmm, replace(WELL, host=Host(hmm=True)), "uvm_disable_hmm=1"),
        (peers.bar1, first(WELL, bar1_bytes=256 * 2**20), "resizable BAR"),
        (peers.sockets, WELL, "replicas"),
        (cards.throttle, first(WELL, throttle=("idle", "power limit")), "raise it"),
        (cards.throttle, first(WELL, throttle=("temperature, by hardware",)), "cooler air"),
        (cards.power, first(WELL, power=Power(300.0, 600.0)), "-pl 600"),
        (cards.mixed, first(WELL, memory_bytes=48 * GIB), "equal cards"),
        (cards.held, first(WELL, free_bytes=50 * GIB, processes=()), "another container"),
        (
            cards.held,
            first(WELL, free_bytes=50 * GIB, processes=(Process(17, "python", GIB),)),
            "kill 17",
        ),
        (
            cards.spinning,
            first(WELL, utilisation=1.0, power=Power(600.0, 600.0, 140.0)),
            "a rank that died",
        ),
        (cards.mig, first(WELL, mig=True), "-mig 0"),
    ],
)
def test_a_sick_machine_gets_a_finding_with_its_fix(check, machine, word):
    assert word in only(check, machine).fix


@pytest.mark.parametrize(
    ("variables", "hurting"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, ["NCCL_P2P_DISABLE"]),
        ({"NCCL_P2P_DISABLE": "0"}, []),
        ({"NCCL_P2P_LEVEL": "nvl"}, ["NCCL_P2P_LEVEL"]),
        ({"NCCL_P2P_LEVEL": "SYS"}, []),
        ({"NCCL_P2P_LEVEL": "PIX"}, ["NCCL_P2P_LEVEL"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,,1,2,3,4"}, ["CUDA_VISIBLE_DEVICES"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ["CUDA_VISIBLE_DEVICES"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["CUDA_VISIBLE_DEVICES"]),
        ({"NCCL_MAX_NCHANNELS": "2", "CUDA_LAUNCH_BLOCKING": "1"},
         ["NCCL_MAX_NCHANNELS", "CUDA_LAUNCH_BLOCKING"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["PYTORCH_CUDA_ALLOC_CONF"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, ["PYTORCH_ALLOC_CONF"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_variables_hurt_by_their_value(variables, hurting):
    found = list(environment.inherited(Patient(replace(WELL, environment=variables))))
    assert [f.evidence.partition("=")[0] for f in found if f.level == "warn"] == hurting
    assert all(f.fix and f.source for f in found if f.level == "warn")


def test_a_low_level_of_peers_is_enough_below_one_switch():
    machine = replace(machine_of("rtx-pro-6000-x8"), environment={"NCCL_P2P_LEVEL": "PIX"})
    assert said(environment.inherited, machine)[0][0] == "warn"
    assert not isinstance(machine.gpus, Unknown)
    one_switch = replace(machine, gpus=machine.gpus[:2])
    between = way(one_switch, 0, 1)
    assert not isinstance(between, Unknown) and between.kind == "PIX"
    assert said(environment.inherited, one_switch)[0][0] == "ok"


def test_what_the_driver_keeps_for_itself_is_nobody_elses():
    small = {"memory_bytes": 16 * GIB, "processes": ()}
    assert not said(cards.held, first(WELL, free_bytes=16 * GIB - 2**29, **small))
    assert only(cards.held, first(WELL, free_bytes=14 * GIB, **small))


def test_p2p_may_be_off_where_the_driver_refuses_it_anyway():
    refused = tuple(Peer(a, b, False, "no") for a, b in PAIRS)
    machine = replace(WELL, peers=refused, environment={"NCCL_P2P_DISABLE": "1"})
    assert said(environment.inherited, machine)[0][0] == "ok"


def test_without_gpus_nobody_worries():
    for module in (peers, cards, environment):
        for check in module.CHECKS:
            assert not list(check.examine(Patient(make_machine())))
