"""Binding: which processors the ranks of one host run on, so that each stays near its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from metainfer.hardware.machine import Gpu, Machine, NumaNode, Unknown

_TOPOLOGY = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cpus_of_ranks(
    machine: Machine, ranks: int, gpus: Sequence[Gpu] = (), root: Path = Path("/")
) -> list[tuple[int, ...]]:
    """The processors of each rank, () where it is left to the system.

    Without GPUs the cores that this process may use are dealt out evenly, neighbours to one rank,
    both threads of a core to the same. With fewer cores than ranks nobody is bound. Ranks of GPUs
    get all that their GPU's memory node has.

    Args:
        root: "/" but for tests.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    nodes = () if isinstance(machine.host.numa_nodes, Unknown) else machine.host.numa_nodes
    if gpus:
        return [_near(gpu, nodes, usable) for gpu in gpus]
    return deal_cores(cores_of(usable, nodes, root), ranks)


def cores_of(usable: Sequence[int], nodes: Sequence[NumaNode], root: Path) -> list[tuple[int, ...]]:
    """The threads of each core, cores of one memory node behind each other."""
    node_of = {cpu: node.number for node in nodes for cpu in node.cpus}
    cores: dict[str, list[int]] = {}
    for cpu in usable:
        cores.setdefault(_siblings(root, cpu), []).append(cpu)
    found = [tuple(threads) for threads in cores.values()]
    return sorted(found, key=lambda threads: (node_of.get(threads[0], 0), threads))


def deal_cores(cores: Sequence[tuple[int, ...]], ranks: int) -> list[tuple[int, ...]]:
    """Equally many cores to each rank, neighbours to one; those that are left over to none."""
    each = len(cores) // ranks
    return [
        tuple(sorted(cpu for core in cores[rank * each : (rank + 1) * each] for cpu in core))
        for rank in range(ranks)
    ]


def _near(gpu: Gpu, nodes: Sequence[NumaNode], usable: Sequence[int]) -> tuple[int, ...]:
    near = next((node.cpus for node in nodes if node.number == gpu.numa_node), ())
    return tuple(cpu for cpu in near if cpu in set(usable))


def _siblings(root: Path, cpu: int) -> str:
    try:
        return (root / _TOPOLOGY.format(cpu)).read_text(encoding="utf-8").strip()
    except OSError:
        return str(cpu)
