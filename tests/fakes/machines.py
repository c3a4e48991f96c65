"""Machines that nobody has, for plans."""

from __future__ import annotations

from dataclasses import replace

from metainfer.hardware.machine import Cpu, Gpu, Machine, Memory, Unknown
from metainfer.hardware.pcie import Bridge, PcieLink

GIB = 2**30
NO_DRIVER = Unknown("there is no driver")


def make_machine(
    *,
    available: int | Unknown = 24 * GIB,
    total: int | Unknown = 32 * GIB,
    limit: int | None = None,
    cores: int = 8,
    quota: float | None = None,
    isa: tuple[str, ...] | Unknown = ("avx2", "avx512_bf16"),
    gpus: tuple[Gpu, ...] | Unknown = NO_DRIVER,
) -> Machine:
    return Machine(
        system="Linux 6.1 x86_64",
        cpu=Cpu("Quick 9000", cores, 2 * cores, quota, isa),
        memory=Memory(total, available, limit),
        gpus=gpus,
        driver=NO_DRIVER,
        versions={"python": "3.12.3", "torch": "2.11.0"},
    )


GEN5 = PcieLink(5, 16, 5, 16)


def two_sockets() -> Machine:
    """Two switches of two cards each at two roots of socket 0, one card at a root of socket 1."""
    card = Gpu("a card", (12, 0), 96 * GIB, 95 * GIB, link=GEN5)
    bridges = (
        Bridge("root a", "root", None, 0),
        Bridge("switch a", "switch", "root a", 0, GEN5),
        Bridge("root b", "root", None, 0),
        Bridge("switch b", "switch", "root b", 0, GEN5),
        Bridge("root c", "root", None, 1),
    )
    parents = ("switch a", "switch a", "switch b", "switch b", "root c")
    gpus = tuple(
        replace(card, parent=parent, numa_node=int(parent == "root c")) for parent in parents
    )
    return replace(make_machine(gpus=gpus), bridges=bridges)
