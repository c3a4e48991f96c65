"""The Machine record and the probe: limits count, what is not known says why, JSON both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.core.errors import UserError
from metainfer.hardware import gpus as gpus_module
from metainfer.hardware import host
from metainfer.hardware.cgroup import Grant, read_grant
from metainfer.hardware.curves import Curve, Rate
from metainfer.hardware.gpus import parse_listing, read_listing
from metainfer.hardware.host import read_cpu, read_memory
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Gpu, Machine, Source, Unknown
from metainfer.hardware.pcie import Bridge, PcieLink, Peer
from metainfer.hardware.probe import probe
from tests.fakes.machines import GIB, make_machine, two_sockets

MEMINFO = "MemTotal: 8388608 kB\nMemFree: 100 kB\nMemAvailable: 6291456 kB\nHugePages_Total: 0\n"


def tree(root: Path, **files: str) -> Path:
    """Files under `root`; "__" in a name stands for "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_probe_of_this_machine_survives_json():
    machine = probe()
    assert Machine.from_json(machine.to_json()) == machine
    assert 1 <= machine.cpu.physical_cores <= machine.cpu.logical_cores
    assert isinstance(machine.memory.total_bytes, int) and machine.memory.total_bytes > 2**27
    assert machine.versions["python"] == sys.version.split()[0]


def test_the_probe_imports_no_torch():
    code = (
        "import sys; from metainfer.hardware.probe import probe; probe();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "machine",
    [
        make_machine(),
        make_machine(gpus=(Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * GIB, 95 * GIB),)),
        replace(make_machine(), gpus=(), driver="580.1"),
        make_machine(isa=Unknown("no flags"), quota=1.5),
    ],
)
def test_json_round_trip(machine):
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.update(shoe_size=43), "unknown machine fields: shoe_size"),
        (lambda r: r["cpu"].update(colour="red"), "unknown machine fields: cpu.colour"),
        (lambda r: r["memory"].pop("total_bytes"), "missing machine fields: memory.total_bytes"),
        (lambda r: r["cpu"].update(physical_cores="four"), "cpu.physical_cores is 'four'"),
        (lambda r: r["cpu"].update(physical_cores=True), "cpu.physical_cores is True"),
        (lambda r: r["cpu"].update(isa=["avx", 2]), r"cpu.isa\[1\] is 2"),
        (lambda r: r["versions"].update(torch=2.13), "versions.torch is 2.13"),
        (lambda r: r.update(gpus={"unknown": 3}), "gpus.unknown is 3"),
        (lambda r: r.update(cpu="fast"), "cpu is 'fast'"),
        (lambda r: r.update(version=99), "version 99"),
    ],
)
def test_a_record_that_is_wrong_is_refused_by_name(change, sentence):
    record = json.loads(make_machine().to_json())
    change(record)
    with pytest.raises(UserError, match=sentence):
        Machine.from_json(json.dumps(record))


def _first(field: str, value):
    return lambda r: r["gpus"][0].update({field: value})


def _curve(**change):
    fields = {
        "means": "NCCL", "operation": "all_reduce", "gpus": [0, 1], "at_once": True,
        "bytes": [8, 16], "seconds": [1e-5, 2e-5], "verified": True, "source": "a paper",
    }  # fmt: skip
    return lambda r: r.update(curves=[{**fields, **change}])


def _rate(**change):
    return lambda r: r.update(
        rates=[{"work": "copy", "rows": 0, "per_s": 1.0, "source": "", **change}]
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_first("multiprocessors", 0), r"gpus\[0\].multiprocessors is 0"),
        (_first("memory_bytes", -1), r"gpus\[0\].memory_bytes is -1"),
        (_first("memory_bytes", 10**400), r"memory_bytes is 1000.*\.\.\., which nothing is"),
        (_first("free_bytes", 97 * GIB), r"gpus\[0\].free_bytes is .*, of 103079215104 in all"),
        (_first("memory_bytes_per_s", float("nan")), "memory_bytes_per_s is nan"),
        (_first("memory_bytes_per_s", float("inf")), "memory_bytes_per_s is inf"),
        (_first("memory_bytes_per_s", 0.0), "memory_bytes_per_s is 0.0"),
        (_first("capability", [0, 0]), r"capability is \[0, 0\]"),
        (_first("utilisation", 5.0), "utilisation is 5.0"),
        (_first("name", ""), r"gpus\[0\].name is ''"),
        (_first("name", "\x1b[31mcard"), r"gpus\[0\].name is .* cannot be shown"),
        (_first("name", "x" * 10**6), "name has 1,000,000 characters"),
        (_first("link", {"generation": 0, "width": 16}), "link.generation is 0"),
        (_first("power", {"limit_w": -4.0}), "power.limit_w is -4.0"),
        (lambda r: [g.update(bus_id="0000:01:00.0") for g in r["gpus"]], r"gpus\[1\].bus_id"),
        (lambda r: r.update(gpus=r["gpus"] * 20), "has 100 GPUs, more than 64"),
        (lambda r: r["cpu"].update(physical_cores=0), "cpu.physical_cores is 0"),
        (lambda r: r["cpu"].update(quota_cores=0.0), "cpu.quota_cores is 0.0"),
        (lambda r: r["memory"].update(total_bytes=-1), "memory.total_bytes is -1"),
        (lambda r: r["bridges"][0].update(parent="switch a"), "go in a circle above 'root a'"),
        (lambda r: r["bridges"].append(r["bridges"][0]), r"bridges\[5\].name is 'root a'"),
        (lambda r: r.update(peers=[{"source": 0, "target": 9, "p2p": True}]), "names GPU 9"),
        (_curve(bytes=[8]), "has 1 sizes, but 2 times"),
        (_curve(bytes=[16, 8]), r"curves\[0\].bytes is 8, after 16"),
        (_curve(bytes=[0, 8]), r"curves\[0\].bytes is 0"),
        (_curve(seconds=[0.0, 1.0]), r"curves\[0\].seconds is 0.0"),
        (_curve(seconds=[1.0, float("nan")]), r"seconds\[1\] is nan"),
        (_curve(gpus=[]), r"curves\[0\].gpus is \[\]"),
        (_curve(gpus=[1, 1]), r"curves\[0\].gpus is \[1, 1\]"),
        (_curve(gpus=[0, 5]), "names GPU 5, and the machine lists 5"),
        (_first("power", {"limit_w": 0.0}), r"gpus\[0\].power.limit_w is 0.0"),
        (_first("clocks", {"sm_mhz": 0, "memory_mhz": 0, "most_sm_mhz": 0}), "most_sm_mhz is 0"),
        (_rate(per_s=0.0), r"rates\[0\].per_s is 0.0"),
        (_rate(rows=-1), r"rates\[0\].rows is -1"),
    ],
)  # fmt: skip
def test_what_no_machine_is_is_refused_by_name(change, sentence):
    record = json.loads(two_sockets().to_json())
    change(record)
    with pytest.raises(UserError, match=sentence) as raised:
        Machine.from_json(json.dumps(record))
    assert len(raised.value.message) < 200 and raised.value.hint


def test_curves_and_rates_that_hold_are_read():
    record = json.loads(two_sockets().to_json())
    _curve()(record)
    _rate()(record)
    machine = Machine.from_json(json.dumps(record))
    assert machine.curves[0].seconds == (1e-5, 2e-5) and machine.rates[0].per_s == 1.0


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 10**5, '{"a":' * 10**5])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(UserError, match="not a JSON record"):
        Machine.from_json(text)


# ---- cgroups ----


def test_cgroup_2_counts_every_enclosing_group(tmp_path):
    base = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/box/job\n",
        proc__self__mountinfo="31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    )
    for name, text in {
        "box/job/memory.max": "max",
        "box/job/cpu.max": "150000 100000",
        "box/memory.max": "4000",
        "box/memory.current": "1500",
        "box/memory.stat": "anon 3\ninactive_file 500\n",
        "box/cpu.max": "max 100000",
        "cpu.max": "800000 100000",
    }.items():
        path = root / base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert read_grant(root) == Grant(4000, 3000, 1.5)


def test_cgroup_1_in_a_container_whose_own_group_is_the_mount(tmp_path):
    root = tree(
        tmp_path,
        proc__self__cgroup="4:memory:/docker/abc\n3:cpuacct,cpu:/docker/abc\n0::/\n",
        proc__self__mountinfo=(
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "36 31 0:33 /other /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        ),
    )
    for name, text in {
        "memory/memory.limit_in_bytes": "9000",
        "memory/memory.usage_in_bytes": "10000",
        "memory/memory.stat": "total_inactive_file 2000",
        "cpu/cpu.cfs_quota_us": "250000",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert read_grant(root) == Grant(9000, 1000, 2.5)


def test_no_cgroups_no_limits(tmp_path):
    assert read_grant(tmp_path) == Grant()


# ---- processor and memory ----


def test_memory_is_bounded_by_the_group(tmp_path):
    root = tree(tmp_path, proc__meminfo=MEMINFO)
    free = read_memory(root, Grant())
    assert (free.total_bytes, free.available_bytes, free.limit_bytes) == (8 * GIB, 6 * GIB, None)
    tight = read_memory(root, Grant(4 * GIB, 3 * GIB))
    assert (tight.total_bytes, tight.available_bytes) == (4 * GIB, 3 * GIB)
    assert tight.limit_bytes == 4 * GIB
    # The group may grant more than the rest of the machine has left.
    assert read_memory(root, Grant(7 * GIB, 7 * GIB)).available_bytes == 6 * GIB
    # A limit above what the machine has is none: version 1 writes 2^63 for "no limit".
    assert read_memory(root, Grant(2**63 - 4096, 2**63 - 4096)) == free


def test_cores_are_those_of_affinity_and_quota(tmp_path, monkeypatch):
    cpu_info = "model name\t: Quick 9000\nflags\t\t: fpu avx2 smep amx_bf16 avx512_bf16\n"
    root = tree(tmp_path, proc__cpuinfo=cpu_info)
    for n in range(8):
        tree(
            root / f"sys/devices/system/cpu/cpu{n}/topology",
            thread_siblings_list=f"{n % 4},{n % 4 + 4}\n",
        )
    monkeypatch.setattr(host, "_usable_cpus", lambda: list(range(8)))
    cpu = read_cpu(root, Grant())
    assert (cpu.model, cpu.physical_cores, cpu.logical_cores) == ("Quick 9000", 4, 8)
    assert cpu.isa == ("amx_bf16", "avx2", "avx512_bf16")
    monkeypatch.setattr(host, "_usable_cpus", lambda: [0, 1, 4])
    assert read_cpu(root, Grant()).physical_cores == 2
    monkeypatch.setattr(host, "_usable_cpus", lambda: list(range(8)))
    for quota, cores in ((2.5, 2), (0.5, 1), (64.0, 4)):
        cpu = read_cpu(root, Grant(cores=quota))
        assert (cpu.physical_cores, cpu.quota_cores) == (cores, quota)


def test_a_host_that_tells_nothing_is_unknown_not_guessed(tmp_path):
    cpu = read_cpu(tmp_path, Grant())
    assert isinstance(cpu.isa, Unknown) and cpu.physical_cores == cpu.logical_cores >= 1
    assert isinstance(read_memory(tmp_path, Grant()).available_bytes, Unknown)


# ---- GPUs ----


def test_the_driver_s_listing():
    listing = (
        "NVIDIA RTX PRO 6000 Blackwell, 12.0, 97887, 97000, 580.65.06\n"
        "NVIDIA GeForce RTX 4090, 8.9, 24564, 20000, 580.65.06\n"
    )
    gpus, driver = parse_listing(listing)
    assert gpus == (
        Gpu("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 97887 * 2**20, 97000 * 2**20),
        Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24564 * 2**20, 20000 * 2**20),
    )
    assert driver == "580.65.06"
    assert parse_listing("") == ((), Unknown("the driver lists no GPU"))
    gpus, _ = parse_listing("NVIDIA GB10, 12.1, [N/A], [N/A], 580.1\n")
    assert isinstance(gpus, Unknown) and "[N/A]" in gpus.why


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no devices; exit 9", "code 9 and said: no devices"),
        (None, "nor nvidia-smi is installed"),
    ],
)
def test_a_driver_that_does_not_answer_is_unknown(tmp_path, monkeypatch, script, why):
    path = None
    if script is not None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setattr(gpus_module.shutil, "which", lambda _: path and str(path))
    gpus, driver = read_listing()
    assert isinstance(gpus, Unknown) and isinstance(driver, Unknown) and why in gpus.why


# ---- topology, curves ----


def test_a_recorded_machine_with_its_tree_survives_json():
    link = PcieLink(1, 16, most_generation=5, most_width=16)
    card = Gpu(
        "a card", (12, 0), 96 * GIB, 95 * GIB, multiprocessors=188, parent="switch", link=link
    )
    machine = replace(
        make_machine(gpus=(card, card)),
        bridges=(Bridge("root", "root", None, 0), Bridge("switch", "switch", "root", 0, link)),
        peers=(Peer(0, 1, True), Peer(1, 0, False, "chipset not supported")),
        environment={"NCCL_P2P_LEVEL": "SYS"},
        curves=(
            Curve("copy engine", "copy", (0, 1), False, (1024, 4096), (2e-6, 3e-6), True, "s"),
        ),
        rates=(Rate("product fp8", 8192, 6.3e14, "s"),),
        sources=(Source("", "https://example.org", "clocks"),),
    )
    assert Machine.from_json(machine.to_json()) == machine


def test_what_a_recorded_machine_leaves_out_was_not_asked():
    record = json.loads(make_machine().to_json())
    for name in ("host", "bridges", "peers", "curves", "environment", "sources"):
        record.pop(name)
    machine = Machine.from_json(json.dumps(record))
    assert machine.bridges == Unknown("nobody looked") and machine.curves == ()


def test_the_rate_of_a_link_is_that_of_its_best_generation_and_its_present_width():
    rate = PcieLink(1, 8, most_generation=5, most_width=16).bytes_per_s()
    assert rate == pytest.approx(8 * 3.938e9, rel=1e-3)
    assert isinstance(PcieLink(9, 16).bytes_per_s(), Unknown)
    assert PcieLink(Unknown("no"), 16).bytes_per_s() == Unknown("no")


def test_a_curve_goes_through_its_points_and_on_at_its_last_rate():
    curve = Curve("copy engine", "copy", (0, 1), False, (1000, 100_000), (1e-5, 1e-4), True, "s")
    assert curve.seconds_of(10) == curve.seconds_of(1000) == 1e-5
    assert curve.seconds_of(50_500) == pytest.approx(5.5e-5)  # a start and a rate
    assert curve.seconds_of(1_000_000) == pytest.approx(1e-3)


def test_a_file_of_a_machine_is_read_with_a_mark_of_its_encoding_and_not_without_end(tmp_path):
    marked = tmp_path / "marked.json"
    marked.write_text(make_machine().to_json(), encoding="utf-8-sig")
    assert machine_of(str(marked)) == make_machine()
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(UserError, match=r"large\.json: the machine is not a JSON record"):
        machine_of(str(large))


@pytest.mark.parametrize(
    ("model", "amd"),
    [
        ("AMD EPYC 9555 64-Core Processor", True),
        ("AMD Ryzen Threadripper PRO 7995WX", True),
        ("Ryzen 9 9950X", True),
        ("Intel(R) Xeon(R) 6787P", False),
        (Unknown("nobody looked"), None),
    ],
)
def test_whose_processor_it_is_is_asked_in_one_place(model, amd):
    assert replace(make_machine().cpu, model=model).of_amd is amd
