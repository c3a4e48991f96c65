"""The host's processor and memory, from /proc and /sys and under the limits of its cgroups."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from metainfer.hardware.cgroup import Grant
from metainfer.hardware.machine import Cpu, Memory, Unknown

# Flags of /proc/cpuinfo that matter to matrix products, by how they begin.
_ISA = ("sse4_2", "avx", "amx_", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")


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
