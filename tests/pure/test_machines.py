"""Recorded machines and cards: they parse, all facts have sources, links fit together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.cli.kernels_coverage import kinds_of
from metainfer.core.errors import UserError
from metainfer.hardware import known
from metainfer.hardware.cards import all_cards, card_named, card_of, card_of_gpu
from metainfer.hardware.curves import MEANS
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_names, machine_of
from metainfer.hardware.machine import Gpu, Machine
from metainfer.hardware.pcie import PcieLink
from metainfer.hardware.topology import fingerprint, islands, p2p_everywhere, shared_uplinks, way
from tests.fakes.command import metainfer

ROOT = Path(__file__).parents[2]
NAMES = {
    "rtx-pro-6000-x8", "rtx-pro-6000-x8-two-sockets", "rtx-pro-6000-x4", "rtx-pro-6000-x2",
    "rtx-6000d-x8", "l40s-x8", "l40s-x4", "rtx-4090-x4", "rtx-5070ti-x2", "a100-pcie-x8", "l20-x8",
    "h200-x1", "b300-x8",
}  # fmt: skip
GROUPS = (
    "gpus.link",
    "gpus.parent",
    "bridges",
    "gpus.memory_bytes",
    "peers",
    "rates",
    "curves",
    "cpu",
)


def gpus_of(machine: Machine) -> tuple[Gpu, ...]:
    assert not isinstance(machine.gpus, Unknown)
    return machine.gpus


def test_there_is_one_of_each_name():
    assert set(machine_names()) == NAMES
    assert len({fingerprint(machine_of(name)) for name in NAMES}) == len(NAMES)


def test_the_files_are_what_the_tables_give():
    command = [sys.executable, "lab/recorded_machines.py", "--check"]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_record_survives_json_and_has_sources(name):
    machine = machine_of(name)
    assert Machine.from_json(machine.to_json()) == machine
    assert all(source.source for source in machine.sources)
    named = " , ".join(source.fields for source in machine.sources)
    for group in GROUPS:
        assert re.search(rf"(^|[ ,]){re.escape(group)}", named), f"{group} has no source"
    assert any(source.fields == "" for source in machine.sources)
    assert all(rate.source and rate.per_s > 0 for rate in machine.rates)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_tree_is_one(name):
    machine = machine_of(name)
    gpus = gpus_of(machine)
    assert len(gpus) == int(name.split("-x")[-1].split("-")[0])
    assert not isinstance(machine.bridges, Unknown) and not isinstance(
        machine.host.sockets, Unknown
    )
    nodes = {bridge.name: bridge.numa_node for bridge in machine.bridges}
    for gpu in gpus:
        assert isinstance(gpu.parent, str) and nodes[gpu.parent] == gpu.numa_node
        assert isinstance(gpu.link, PcieLink) and gpu.link.bytes_per_s() > 25e9
    for bridge in machine.bridges:
        assert (bridge.kind == "root") == (bridge.parent is None)
        assert bridge.parent is None or nodes[bridge.parent] == bridge.numa_node
    for source in range(len(gpus)):
        for target in range(len(gpus)):
            assert source == target or not isinstance(way(machine, source, target), Unknown)
    sides = islands(machine)
    assert not isinstance(sides, Unknown) and len(sides) == machine.host.sockets


@pytest.mark.parametrize("name", sorted(NAMES))
def test_peers_are_all_pairs_with_a_reason(name):
    machine = machine_of(name)
    count = len(gpus_of(machine))
    assert not isinstance(machine.peers, Unknown)
    pairs = [(peer.source, peer.target) for peer in machine.peers]
    assert pairs == [(a, b) for a in range(count) for b in range(count) if a != b]
    card = card_of_gpu(gpus_of(machine)[0])
    assert card is not None and all(peer.p2p == card.p2p for peer in machine.peers)
    assert all((peer.p2p is True) == (peer.why == "") for peer in machine.peers)
    assert machine.nvlink == name.startswith("b300")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_curves_ascend_and_name_gpus_of_the_machine(name):
    machine = machine_of(name)
    count = len(gpus_of(machine))
    assert machine.curves
    for curve in machine.curves:
        assert curve.means in MEANS and curve.source
        assert set(curve.gpus) <= set(range(count)) and len(set(curve.gpus)) == len(curve.gpus)
        assert len(curve.bytes) == len(curve.seconds) >= 2
        assert list(curve.bytes) == sorted(set(curve.bytes)) and curve.bytes[0] > 0
        # Ten times the bytes never take less; neighbours may, within what such tables scatter.
        for low, high in zip(curve.bytes, curve.bytes[1:], strict=False):
            assert curve.seconds_of(high) > 0.9 * curve.seconds_of(low) > 0
        assert curve.seconds[-1] > curve.seconds[0]
        # Nothing is faster than the links of the cards, where there is no NVLink.
        if machine.nvlink is False and curve.operation == "copy":
            link = gpus_of(machine)[0].link
            assert isinstance(link, PcieLink)
            assert curve.bytes[-1] / curve.seconds[-1] < link.bytes_per_s()


def test_what_the_machines_are_known_for():
    switched = shared_uplinks(machine_of("rtx-pro-6000-x8"))
    assert switched == {f"switch {n}": (2 * n, 2 * n + 1) for n in range(4)}
    assert islands(machine_of("l40s-x8")) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert islands(machine_of("l40s-x4")) == ((0, 1, 2, 3),)
    for name in ("rtx-4090-x4", "rtx-5070ti-x2"):
        machine = machine_of(name)
        assert p2p_everywhere(machine) is False
        assert not isinstance(machine.peers, Unknown)
        assert {peer.why for peer in machine.peers} == {"not supported by the driver as shipped"}
    # NCCL as it comes moves 1.45 GB/s on the bus of eight L40S.
    nccl = machine_of("l40s-x8").curves[0]
    assert 2**29 * 1.75 / nccl.seconds_of(2**29) == pytest.approx(1.45e9, rel=0.01)


# ---- cards ----


def test_every_card_has_sources_and_rates_below_its_nominal_ones():
    formats = {"bf16", "fp8", "fp4"}
    for card in all_cards():
        named = " ".join(source.fields for source in card.sources)
        for field in ("multiprocessors", "memory_bytes", "operations_per_s", "power_w", "p2p"):
            assert field in named, (card.name, field)
        assert card.operations_per_s.keys() <= formats and isinstance(card.price, Unknown)
        assert bool(card.p2p_why) or card.p2p
        for rate in card.rates:
            work, _, operands = rate.work.rpartition(" ")
            if work and operands in card.operations_per_s:
                assert rate.per_s < card.operations_per_s[operands], (card.name, rate.work)


def test_a_card_is_its_name_and_its_silicon():
    gib = 2**30
    assert card_of("NVIDIA L40S", (8, 9)) == card_named("L40S")
    assert card_of("NVIDIA L40S", (8, 9), 142, 46068 * 2**20) == card_named("L40S")
    assert card_of("NVIDIA L40S", (8, 9), 142, 49140 * 2**20) == card_named("L40S")  # without ECC
    assert card_of("NVIDIA GeForce RTX 4090", (8, 9), 128, 48 * gib) is None  # memory soldered on
    assert card_of("NVIDIA H200", (9, 0), 60, 141 * gib) is None  # a part of one
    assert card_of("NVIDIA GeForce RTX 4090 D", (8, 9)) is None
    assert card_of("NVIDIA RTX PRO 6000 Blackwell Server Edition", (8, 9)) is None
    assert card_of("NVIDIA RTX 6000D", (12, 0), Unknown("no")) == card_named("RTX 6000D")
    names = {"Server Edition": "RTX PRO 6000", "Workstation Edition": "RTX PRO 6000",
             "Max-Q Workstation Edition": "RTX PRO 6000 Max-Q"}  # fmt: skip
    for edition, name in names.items():
        found = card_of(f"NVIDIA RTX PRO 6000 Blackwell {edition}", (12, 0), 188)
        assert found is not None and found.name == name


def test_a_rate_is_that_of_most_rows():
    h200 = card_named("H200")
    rate = h200.rate("product fp8")
    assert rate is not None and (rate.rows, rate.per_s) == (8192, 1106e12)
    assert h200.rate("weaving") is None


# ---- machine_of ----


def test_a_record_of_a_file_is_read(tmp_path):
    machine = replace(machine_of("l40s-x4"), driver="580.95")
    path = tmp_path / "mine.json"
    path.write_text(machine.to_json())
    assert machine_of(str(path)) == machine


def test_without_a_name_the_machine_at_hand_is_probed(monkeypatch):
    machine = machine_of("h200-x1")
    monkeypatch.setattr(known, "probe", lambda: machine)
    assert machine_of(None) is machine


def test_mistakes_name_the_thing_and_list_the_names(tmp_path):
    with pytest.raises(UserError, match="'l40s-x9' is no file and no recorded machine") as caught:
        machine_of("l40s-x9")
    hint = caught.value.hint or ""
    assert "did you mean l40s-x" in hint and all(name in hint for name in NAMES)
    for text, sentence in ((b"{", "not a JSON record"), (b"\xff\xfe", "not a JSON record"),
                           (json.dumps({"version": 1}).encode(), "version 1")):  # fmt: skip
        path = tmp_path / "odd.json"
        path.write_bytes(text)
        with pytest.raises(UserError, match=f"odd.json: .*{sentence}"):
            machine_of(str(path))
    for odd in (str(tmp_path), "m" * 5000, "m\0"):
        with pytest.raises(UserError, match="is no file"):
            machine_of(odd)
    refused = "^--machine: /proc/self/mem cannot be read: Input/output error$"
    with pytest.raises(UserError, match=refused):
        machine_of("/proc/self/mem")


def test_records_ship_with_the_package():
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {"hardware/cards.json", "hardware/machines/*.json"} <= set(
        data["package-data"]["metainfer"]
    )


# ---- which kernels a machine needs ----


def test_coverage_takes_kinds_of_cards_from_the_machine():
    (target,) = (kinds := kinds_of(machine_of("rtx-6000d-x8"), "rtx-6000d-x8"))
    kind = kinds[target]
    assert (target, kind.multiprocessors, kind.card) == ("sm_120", 156, "NVIDIA RTX 6000D")
    mixed = replace(
        machine_of("l40s-x4"),
        gpus=(*gpus_of(machine_of("l40s-x4")), *gpus_of(machine_of("a100-pcie-x8"))),
    )
    assert list(kinds_of(mixed, "mine.json")) == ["sm_89", "sm_80"]
    for machine, sentence in (
        (machine_of("b300-x8"), "no kernels for sm_103"),
        (replace(mixed, gpus=()), "no known GPU"),
        (replace(mixed, gpus=Unknown("there is no driver")), "there is no driver"),
    ):
        with pytest.raises(UserError, match=sentence):
            kinds_of(machine, "mine.json")


def test_target_and_machine_do_not_go_together():
    ran = metainfer("kernels", "coverage", "--machine", "l40s-x8", "--target", "sm_80")
    assert ran.code == 2 and "--target and --machine both say" in ran.err
