"""Machines that nobody has, for plans."""

from __future__ import annotations

from metainfer.hardware.machine import Cpu, Gpu, Machine, Memory, Unknown

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
