"""The host's processor and memory, from /proc and /sys and under the limits of its cgroups."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from metainfer.hardware.cgroup import Grant
from metainfer.hardware.machine import Cpu, Host, Memory, NumaNode, Unknown

# Flags of /proc/cpuinfo that matter to matrix products, by how they begin.
_ISA = ("sse4_2", "avx", "amx_", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")

# Parameters of the kernel that decide how devices reach memory and each other, by how they begin.
_TELLING = ("iommu", "amd_iommu", "intel_iommu", "pci", "numa", "hugepage", "transparent_hugepage")


def read_cpu(root: Path, grant: Grant) -> Cpu:
    """The processor; `root` is "/" but for tests."""
    info = _cpu_info(root)
    usable = _usable_cpus()
    granted = len(usable) if grant.cores is None else max(1, int(grant.cores))
    flags = info.get("flags", info.get("Features"))
    return Cpu(
        model=info.get("model name") or platform.processor() or Unknown("nothing names it"),
        physical_cores=min(_count_cores(root, usable), granted),
        logical_cores=min(len(usable), granted),
        quota_cores=grant.cores,
        isa=Unknown("/proc/cpuinfo lists no flags")
        if flags is None
        else tuple(sorted({flag for flag in flags.split() if flag.startswith(_ISA)})),
    )


def read_memory(root: Path, grant: Grant) -> Memory:
    """The memory; `root` is "/" but for tests."""
    info = _memory_info(root)
    total: int | Unknown = info.get("MemTotal") or _total_bytes()
    available: int | Unknown = info.get("MemAvailable") or Unknown("/proc/meminfo does not say")
    limit = grant.memory_bytes
    if limit is not None and isinstance(total, int) and limit >= total:
        limit = None
    if limit is not None:
        total = limit
        left = limit if grant.memory_left_bytes is None else grant.memory_left_bytes
        available = min(left, available) if isinstance(available, int) else left
    return Memory(total, available, limit)


def read_host(root: Path) -> Host:
    """What of the host decides how GPUs talk to each other; `root` is "/" but for tests."""
    nodes = _numa_nodes(root)
    parameters = _text(root / "proc/cmdline").strip()
    return Host(
        board=_board(root),
        sockets=_sockets(root),
        numa_nodes=nodes or Unknown("/sys/devices/system/node lists none"),
        memory_bytes_per_s=Unknown("only the administrator may read the memory's modules"),
        iommu=_iommu(root, parameters),
        hmm=_hmm(root),
        kernel_parameters=_telling(parameters)
        if parameters
        else Unknown("/proc/cmdline cannot be read"),
        relaxed_p2p=_driver_switch(root, "RegistryDwords", "ForceP2P"),
    )


def _telling(parameters: str) -> str:
    """Those that bear on devices and memory; the rest is nobody's business."""
    return " ".join(word for word in parameters.split() if word.startswith(_TELLING))


def _board(root: Path) -> str | Unknown:
    names = [
        _text(root / f"sys/class/dmi/id/{part}").strip() for part in ("sys_vendor", "product_name")
    ]
    return " ".join(name for name in names if name) or Unknown("the firmware does not say")


def _sockets(root: Path) -> int | Unknown:
    found = {
        _text(path).strip()
        for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    }
    return len(found) or Unknown("the topology of processors is not told")


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    found = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        memory: int | Unknown = Unknown("its meminfo does not say")
        for line in _text(path / "meminfo").splitlines():
            words = line.split()
            if len(words) == 5 and words[2] == "MemTotal:":
                memory = int(words[3]) * 1024
        number = int(path.name.removeprefix("node"))
        found.append(NumaNode(number, tuple(_cpu_list(_text(path / "cpulist"))), memory))
    return tuple(sorted(found, key=lambda node: node.number))


def _cpu_list(text: str) -> list[int]:
    """ "0-3,8" -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def _iommu(root: Path, parameters: str) -> str | Unknown:
    groups = root / "sys/kernel/iommu_groups"
    if not groups.is_dir():
        return Unknown("/sys/kernel/iommu_groups is not here")
    kinds = {_text(path).strip() for path in groups.glob("*/type")}
    if not any(groups.iterdir()):
        return "off"
    if kinds == {"identity"} or "iommu=pt" in parameters.split():
        return "passthrough"
    return "translating"


def _hmm(root: Path) -> bool | Unknown:
    text = _text(root / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm").strip()
    return text != "Y" if text in ("Y", "N") else Unknown("the driver's nvidia_uvm does not say")


def _driver_switch(root: Path, parameter: str, word: str) -> bool | Unknown:
    for line in _text(root / "proc/driver/nvidia/params").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == parameter:
            return word in value
    return Unknown("/proc/driver/nvidia/params is not here")


def _cpu_info(root: Path) -> dict[str, str]:
    """The first processor's lines."""
    found: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _memory_info(root: Path) -> dict[str, int]:
    """Bytes by name."""
    found = {}
    for line in _text(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def _total_bytes() -> int | Unknown:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return Unknown("the system does not tell")


def _usable_cpus() -> list[int]:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _count_cores(root: Path, cpus: list[int]) -> int:
    """Cores behind `cpus`; without a known topology each is taken for one."""
    topology = root / "sys/devices/system/cpu"
    return len({_text(topology / f"cpu{n}/topology/thread_siblings_list") or n for n in cpus})


def _text(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
