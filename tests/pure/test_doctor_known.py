"""Checks of versions, reports, hosts and ports."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.arch.families import known_names
from metainfer.arch.shape_of import read_shape
from metainfer.doctor.checks import host, notes, port, versions
from metainfer.doctor.finding import Level, Patient
from metainfer.doctor.known import parts, read_notes, read_pairs, versions_of
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Host, Machine, NumaNode
from metainfer.hardware.ports import Port, Program, read_port


def having(driver: str = "580.95", name: str = "rtx-pro-6000-x2", **packages: str) -> Machine:
    given = {key.replace("_", "-"): version for key, version in packages.items()}
    return replace(machine_of(name), versions=given, driver=driver)


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        (having(nvidia_cutlass_dsl="4.6.0"), ["CUTLASS DSL 4.6.0 on sm_120"]),
        (having(nvidia_cutlass_dsl="4.5.3"), []),
        (having(name="l40s-x8", nvidia_cutlass_dsl="4.6.0"), []),
        (having(nvidia_nccl_cu12="2.26.2"), ["NCCL 2.26.2 between cards of sm_120"]),
        (having(nvidia_nccl_cu12="2.25.1"), ["NCCL before 2.26.2 on Blackwell"]),
        (having(nvidia_nccl_cu13="2.31.2"), []),
        (having(triton="3.2.0", torch="2.11.0"), ["Triton before 3.3 on sm_120"]),
        (having("575.51", torch="2.11.0+cu130"), ["torch for CUDA 13 on an older driver"]),
        (having("575.51", torch="2.11.0+cu128"), []),
        (having("565.57"), ["a driver that does not know Blackwell's workstation cards"]),
        (having("565.57", name="l40s-x4"), []),
        (having(torch="2.9.1"), ["this engine on an older torch"]),
    ],
)
def test_pairs_that_are_bad_together(machine: Machine, names: list[str]):
    findings = list(versions.versions(Patient(machine)))
    assert [one.what for one in findings if one.level is not Level.OK] == names
    assert all(one.fix and one.source and one.matters for one in findings if one.what in names)


def test_versions_that_nobody_recorded_are_unknown():
    (finding,) = versions.versions(Patient(machine_of("rtx-6000d-x8")))
    assert finding.level is Level.UNKNOWN
    assert parts("2.11.0+cu130") == (2, 11, 0) and parts("0.6.16.post4") == (0, 6, 16, 4)
    assert versions_of(having(torch="2.11.0+cu126"))["cuda"] == "12.6"


def test_records_of_others_have_all_that_a_finding_needs():
    families = {read_shape(name).side.family for name in known_names()}
    for note in read_notes():
        assert Level(note.level) and note.what and note.evidence and note.source
        assert bool(note.fix) == (note.level == "warn") or note.level == "ok"
        assert set(note.families) <= families
    for pair in read_pairs():
        assert Level(pair.level) and pair.when and pair.fix and pair.source


def notes_of(machine: str, model: str | None) -> list[str]:
    shape = None if model is None else read_shape(model)
    return [one.what for one in notes.notes(Patient(machine_of(machine), shape=shape))]


def test_notes_go_by_card_model_and_heads_of_a_rank():
    eight_heads = "vLLM and SGLang have no fast sparse prefill for V4.1 with 8 heads a rank"
    assert any(eight_heads in one for one in notes_of("rtx-6000d-x8", "deepseek-v4.1-flash"))
    for machine, model in (
        ("rtx-pro-6000-x4", "deepseek-v4.1-flash"),  # 16 heads at the least
        ("l40s-x8", "deepseek-v4.1-flash"),
        ("rtx-6000d-x8", "deepseek-v4-flash"),
        ("rtx-6000d-x8", None),
    ):
        assert not any(eight_heads in one for one in notes_of(machine, model))
    assert not any("custom all-reduce" in one for one in notes_of("rtx-pro-6000-x2", None))
    assert any("custom all-reduce" in one for one in notes_of("l40s-x8", None))
    assert any("--enable-hierarchical" in one for one in notes_of("l40s-x8", "deepseek-v4-flash"))
    assert not any("--enable-hierarchical" in one for one in notes_of("l40s-x8", "glm-5.3"))
    assert any("have given NaN" in one for one in notes_of("rtx-6000d-x8", None))
    assert not any("have given NaN" in one for one in notes_of("l40s-x8", None))


def test_host_memory_matters_where_everything_goes_through_it():
    def of(name: str, known: float | Unknown) -> list[str]:
        machine = replace(machine_of(name), host=Host(memory_bytes_per_s=known))
        return [str(one.level) for one in host.bandwidth(Patient(machine))]

    assert of("rtx-5070ti-x2", 90e9) == ["warn"] and of("rtx-5070ti-x2", 460e9) == ["ok"]
    assert of("rtx-pro-6000-x4", 90e9) == ["ok"]
    assert of("rtx-5070ti-x2", Unknown("no")) == ["unknown"] and not of("h200-x1", 90e9)


def test_cores_and_nodes():
    machine = machine_of("rtx-6000d-x8")
    few = replace(machine, cpu=replace(machine.cpu, quota_cores=6.0))
    (finding,) = host.cores(Patient(few))
    assert finding.level == "warn" and "6 cores" in finding.what
    assert next(iter(host.cores(Patient(machine)))).level == "ok"
    bare = (NumaNode(0, (0,), 2**38), NumaNode(1, (1,), 0))
    (finding,) = host.nodes(Patient(replace(machine, host=Host(numa_nodes=bare))))
    assert finding.level == "warn" and "1" in finding.what
    assert not list(host.nodes(Patient(machine)))


def process(root: Path, pid: int, parent: int, command: str, started_s: float, *links: str):
    """A process as /proc shows it."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    ticks = round(started_s * os.sysconf("SC_CLK_TCK"))
    fields = ["S", str(parent), *["0"] * 17, str(ticks)]
    (folder / "stat").write_text(f"{pid} (a (name) {' '.join(fields)}")
    (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
    for number, link in enumerate(links):
        (folder / "fd" / str(number)).symlink_to(link)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "uptime").write_text("10000.0 1.0\n")
    head = "  sl  local_address rem_address st tx rx tr tm retrnsmt uid timeout inode\n"
    line = "   0: 00000000:1F40 00000000:0000 0A 0:0 00:0 0 0 0 777 1\n"
    other = "   1: 00000000:1F41 00000000:0000 01 0:0 00:0 0 0 0 778 1\n"
    (tmp_path / "proc" / "net" / "tcp").write_text(head + line + other)
    return tmp_path


SERVE = "/usr/bin/vllm serve model --api-key secret"


def test_a_port_served_by_an_older_process_is_found(root: Path):
    process(root, 10, 1, SERVE, 1000, "socket:[777]", "/dev/null")
    process(root, 11, 10, SERVE, 1001, "socket:[777]")  # a worker of it
    process(root, 20, 1, SERVE, 9000, "socket:[779]")
    known = read_port(root, 8000)
    assert known == Port(8000, Program(10, "vllm serve model", 9000.0),
                         (Program(20, "vllm serve model", 1000.0),))  # fmt: skip
    (finding,) = port.port(Patient(machine_of("h200-x1"), port=known))
    assert finding.level == "fail" and "kill 10" in finding.fix and "secret" not in str(finding)


def test_ports_without_trouble(root: Path):
    assert read_port(root, 8001) == Port(8001, None)  # connected, not listening
    hidden = read_port(root, 8000)
    assert isinstance(hidden, Port) and isinstance(hidden.owner, Unknown)
    process(root, 10, 1, SERVE, 1000, "socket:[777]")
    known = read_port(root, 8000)
    assert isinstance(known, Port) and not known.later
    cases = ((known, "ok"), (hidden, "unknown"), (Port(1, None), "ok"), (Unknown("x"), "unknown"))
    for one, level in cases:
        (finding,) = port.port(Patient(machine_of("h200-x1"), port=one))
        assert finding.level == level
    assert not list(port.port(Patient(machine_of("h200-x1"))))
    assert isinstance(read_port(root / "nowhere", 80), Unknown)


def test_the_port_of_this_machine():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        known = read_port(Path("/"), server.getsockname()[1])
    assert isinstance(known, Port) and isinstance(known.owner, Program)
    assert known.owner.pid == os.getpid()
