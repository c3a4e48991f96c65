"""What the driver and sysfs tell of GPUs: facts where they tell them, Unknown with the why else."""

from __future__ import annotations

from pathlib import Path

import pytest

from metainfer.core.env import inherited
from metainfer.hardware import gpus as gpus_module
from metainfer.hardware.facts import Unknown
from metainfer.hardware.gpus import read_gpus
from metainfer.hardware.host import read_host
from metainfer.hardware.machine import Clocks, Gpu, Power, Process
from metainfer.hardware.nvml import Nvml
from metainfer.hardware.pci_tree import read_tree
from metainfer.hardware.pcie import PcieLink, Peer
from tests.fakes.nvml import FakeCard, FakeLibrary

GIB = 2**30
FACTS = {
    "capability": (12, 0),
    "nvmlDeviceGetName": b"NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "nvmlDeviceGetMemoryInfo": {"total": 96 * GIB, "free": 95 * GIB, "used": GIB},
    "nvmlDeviceGetBAR1MemoryInfo": {"total": 128 * GIB, "free": 127 * GIB, "used": GIB},
    "nvmlDeviceGetPciInfo_v3": {"domain": 0, "bus": 0x41, "device": 0},
    "nvmlDeviceGetNumGpuCores": 188 * 128,
    "nvmlDeviceGetMemoryBusWidth": 512,
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "clock_1": 2400,
    "most_clock_1": 2430,
    "most_clock_2": 14001,
    "nvmlDeviceGetEnforcedPowerLimit": 450_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 600_000,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x20,
    "nvmlDeviceGetEccMode": 1,
    "nvmlDeviceGetUtilizationRates": {"gpu": 40},
    "processes": ((17, 3 * GIB), (18, 2**64 - 1)),
}


def driver(monkeypatch, library):
    monkeypatch.setattr(gpus_module.Nvml, "open", lambda: Nvml(library))


def test_a_card_with_all_it_tells(monkeypatch, tmp_path):
    (tmp_path / "proc/17").mkdir(parents=True)
    (tmp_path / "proc/17/comm").write_text("python\n")
    driver(monkeypatch, FakeLibrary([FakeCard(**FACTS)]))
    listing = read_gpus(tmp_path)
    (gpu,) = listing.gpus
    assert (gpu.name, gpu.capability) == (FACTS["nvmlDeviceGetName"].decode(), (12, 0))
    assert (gpu.memory_bytes, gpu.free_bytes) == (96 * GIB, 95 * GIB)
    assert (gpu.multiprocessors, gpu.bar1_bytes) == (188, 128 * GIB)
    assert (gpu.bus_id, gpu.link) == ("0000:41:00.0", PcieLink(1, 8, 5, 16))
    assert gpu.memory_bytes_per_s == pytest.approx(1.792e12, rel=1e-3)
    memory_clock = Unknown("nvmlDeviceGetClockInfo: Not Supported")
    assert gpu.clocks == Clocks(2400, memory_clock, 2430, 14001)
    assert gpu.power == Power(450.0, 600.0, Unknown("nvmlDeviceGetPowerUsage: Not Supported"))
    assert gpu.throttle == ("power limit", "temperature, by software")
    assert gpu.ecc is True and gpu.mig == Unknown("nvmlDeviceGetMigMode: Not Supported")
    assert gpu.utilisation == 0.4
    hidden = Unknown("it lives outside of this container, or has ended")
    silent = Unknown("the driver does not say")
    assert gpu.processes == (Process(17, "python", 3 * GIB), Process(18, hidden, silent))
    assert (listing.driver, listing.peers, listing.nvlink) == ("580.95.05", (), False)


def test_peers_that_the_driver_refuses_say_why(monkeypatch, tmp_path):
    statuses = {(0, 1, 1): 4, (0, 1, 2): 5, (1, 0, 2): 5, (0, 1, 3): 5}
    driver(monkeypatch, FakeLibrary([FakeCard(**FACTS), FakeCard(**FACTS)], statuses))
    listing = read_gpus(tmp_path)
    assert listing.nvlink is False
    assert listing.peers == (
        Peer(0, 1, False, "switched off by a setting of the driver", atomics=False),
        Peer(1, 0, True, "", atomics=True),
    )


def test_cards_linked_by_nvlink(monkeypatch, tmp_path):
    driver(monkeypatch, FakeLibrary([FakeCard(**FACTS), FakeCard(**FACTS)]))
    assert read_gpus(tmp_path).nvlink is True


def test_a_library_that_is_not_there_leads_to_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus_module.Nvml, "open", lambda: Unknown("gone"))
    monkeypatch.setattr(gpus_module.shutil, "which", lambda _: None)
    listing = read_gpus(tmp_path)
    assert isinstance(listing.gpus, Unknown) and "is installed" in listing.gpus.why


# ---- the tree ----


class Sysfs:
    """Writes devices below the path that the kernel would give them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)

    def device(self, *chain: str, config: bytes | None = None, **files: str) -> None:
        path = self.root / "sys/devices" / Path(*chain)
        path.mkdir(parents=True)
        for name, text in files.items():
            (path / name).write_text(text + "\n")
        if config is not None:
            (path / "config").write_bytes(config)
        (self.root / "sys/bus/pci/devices" / chain[-1]).symlink_to(path)


def acs(control: int) -> bytes:
    """A configuration space whose second extended capability is access control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 0x150 << 20).to_bytes(4, "little")
    space[0x150:0x154] = (0x000D).to_bytes(4, "little")
    space[0x156:0x158] = control.to_bytes(2, "little")
    return bytes(space)


def card(bus_id: str | Unknown) -> Gpu:
    return Gpu("a card", (12, 0), 96 * GIB, 95 * GIB, bus_id=bus_id)


def test_two_cards_below_one_switch_and_one_at_a_root(tmp_path):
    sysfs = Sysfs(tmp_path)
    link = {
        "current_link_speed": "2.5 GT/s PCIe",
        "current_link_width": "16",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
    }
    root, switch = ("pci0000:40", "0000:40:01.1"), ("0000:41:00.0", "0000:42:00.0")
    sysfs.device(*root, numa_node="0", config=acs(0x1D))
    sysfs.device(*root, *switch[:1], numa_node="0", config=acs(0), **link)
    sysfs.device(*root, *switch, numa_node="0", config=bytes(64), **link)
    sysfs.device(*root, *switch[:1], "0000:42:01.0", numa_node="0", config=bytes(4096), **link)
    sysfs.device(*root, *switch, "0000:43:00.0", numa_node="0")
    sysfs.device(*root, *switch[:1], "0000:42:01.0", "0000:44:00.0", numa_node="0")
    sysfs.device("pci0000:80", "0000:80:01.1", numa_node="-1")
    sysfs.device("pci0000:80", "0000:80:01.1", "0000:81:00.0", numa_node="1")
    found, bridges = read_tree(
        tmp_path, [card("0000:43:00.0"), card("0000:44:00.0"), card("0000:81:00.0")]
    )
    assert [gpu.parent for gpu in found] == ["0000:42:00.0", "0000:42:01.0", "0000:80:01.1"]
    assert [gpu.numa_node for gpu in found] == [0, 0, 1]
    by_name = {bridge.name: bridge for bridge in bridges}
    assert by_name["0000:42:01.0"].parent == by_name["0000:42:00.0"].parent == "0000:41:00.0"
    assert by_name["0000:41:00.0"].link == PcieLink(1, 16, 5, 16)
    assert by_name["0000:40:01.1"].kind == "root" and by_name["0000:41:00.0"].kind == "switch"
    assert by_name["0000:40:01.1"].acs_redirects is True
    assert by_name["0000:41:00.0"].acs_redirects is False
    assert by_name["0000:42:01.0"].acs_redirects is False  # has none
    assert "administrator" in by_name["0000:42:00.0"].acs_redirects.why
    assert isinstance(by_name["0000:80:01.1"].numa_node, Unknown)


def test_a_tree_that_cannot_be_seen_says_why(tmp_path):
    assert "no /sys/bus/pci" in read_tree(tmp_path, [card("0000:43:00.0")])[1].why
    Sysfs(tmp_path)
    assert "hides it" in read_tree(tmp_path, [card("0000:43:00.0")])[1].why
    assert read_tree(tmp_path, [card(Unknown("no call"))])[1] == Unknown("no call")
    assert read_tree(tmp_path, []) == ((), ())


# ---- host and environment ----


def test_a_host_with_two_sockets(tmp_path):
    for name, text in {
        "proc/cmdline": "quiet root=/dev/sda amd_iommu=on iommu=pt\n",
        "sys/class/dmi/id/sys_vendor": "Board Maker\n",
        "sys/class/dmi/id/product_name": "X1\n",
        "sys/devices/system/cpu/cpu0/topology/physical_package_id": "0\n",
        "sys/devices/system/cpu/cpu1/topology/physical_package_id": "1\n",
        "sys/devices/system/node/node1/cpulist": "1,4-5\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  2048 kB\n",
        "sys/devices/system/node/node0/cpulist": "0,2-3\n",
        "sys/kernel/iommu_groups/0/type": "identity\n",
        "sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "Y\n",
        "proc/driver/nvidia/params": 'EnableMSI: 1\nRegistryDwords: "ForceP2P=0x11"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    host = read_host(tmp_path)
    assert (host.board, host.sockets, host.iommu, host.hmm) == (
        "Board Maker X1", 2, "passthrough", False,
    )  # fmt: skip
    assert [(node.number, node.cpus) for node in host.numa_nodes] == [
        (0, (0, 2, 3)),
        (1, (1, 4, 5)),
    ]
    assert host.numa_nodes[1].memory_bytes == 2048 * 1024
    assert host.kernel_parameters == "amd_iommu=on iommu=pt" and host.relaxed_p2p is True


def test_a_host_that_tells_nothing(tmp_path):
    host = read_host(tmp_path)
    for fact in (host.board, host.sockets, host.numa_nodes, host.iommu, host.hmm, host.relaxed_p2p):
        assert isinstance(fact, Unknown) and fact.why


def test_keys_in_the_environment_are_not_recorded(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    found = inherited(("NCCL_", "VLLM_"))
    assert found["NCCL_P2P_DISABLE"] == "1" and "hush" not in found.values()
