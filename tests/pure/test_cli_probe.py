"""`metainfer probe`: the record on disk is the record, and its text fits a terminal."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from metainfer.cli.machine_text import machine_lines
from metainfer.hardware.curves import Curve, Rate
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Host, Machine, Power, Process
from metainfer.hardware.pcie import PcieLink, Peer
from tests.fakes.command import metainfer
from tests.fakes.machines import make_machine, two_sockets


def test_a_record_is_written_and_read_back(tmp_path):
    ran = metainfer("probe", "--out", str(tmp_path / "deep/machine.json"), "--json")
    written = (tmp_path / "deep/machine.json").read_text()
    assert ran.code == 0 and json.loads(ran.out) == json.loads(written)
    assert Machine.from_json(written).cpu.physical_cores >= 1


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    ran = metainfer("probe", "--out", str(tmp_path / "file/machine.json"))
    assert ran.code != 0 and str(tmp_path / "file") in ran.err and ran.err.count("\n") <= 2


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    ran = metainfer("probe", "--out", str(tmp_path))
    assert ran.code == 2 and f"--out: {tmp_path} is a directory" in ran.err
    assert metainfer("probe", "--out", "").code == 2
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert metainfer("probe", "--machine", "h200-x1", "--out", str(pipe)).code == 0
        assert os.read(reader, 2**20).startswith(b"{") and pipe.is_fifo()
    finally:
        os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]


def test_the_text_of_a_large_machine_fits_a_terminal():
    machine = two_sockets()
    assert not isinstance(machine.gpus, Unknown)
    sick = replace(
        machine.gpus[0],
        name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        link=PcieLink(1, 8, 5, 16),
        throttle=("power limit",),
        power=Power(300.0),
        processes=(Process(17, "python", 2**30), Process(18, Unknown("no"), Unknown("no"))),
        utilisation=Unknown("nvmlDeviceGetUtilizationRates: Not Supported"),
    )
    machine = replace(
        machine,
        gpus=(sick, *machine.gpus[1:]),
        peers=(Peer(0, 1, True), Peer(0, 4, False, "the chipset does not support it")),
        host=Host(board="Board " * 30, sockets=2, iommu="translating", hmm=True),
        curves=(
            Curve("NCCL", "all_reduce", tuple(range(5)), True, (1024,), (1e-5,), True, "a" * 99),
        ),
        rates=(
            Rate("product fp8", 8192, 5e14, "measured here"),
            Rate("product bf16", 8192, 2e14, "some pages " * 20),
            Rate("copy", 0, 1e12, "measured here"),
        ),
        environment={"NCCL_P2P_DISABLE": "1"},
    )
    lines = machine_lines(machine)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for said in (
        "1x8 of 5x16", "clocks lowered: power limit", "process 17 (python) holds", "switch a",
        "SYS-", "no access: the chipset does not support it", "NCCL_P2P_DISABLE=1",
        "unknown      gpu 0 utilisation: nvmlDeviceGetUtilizationRates: Not Supported",
        "product fp8, 8192 rows: 5e+14 operations/s [2]", "IOMMU        translating",
        "copy: 1e+12 B/s [2]", "\n[2] measured here", f"[1]\n    {'a' * 96}",
    ):  # fmt: skip
        assert said in text
    assert " ".join(text.split()).count("some pages") == 20  # whole, at its number


def test_without_gpus_it_says_so():
    assert machine_lines(make_machine()) == ["GPUs: unknown (there is no driver)"]
    assert machine_lines(replace(make_machine(), gpus=())) == ["GPUs: none"]
