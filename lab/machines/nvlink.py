"""Recorded machines with NVLink, for comparison."""

from __future__ import annotations

from lab.machines.figures import (
    GIB,
    KIB,
    MIB,
    OWN,
    at_rate,
)
from lab.machines.rtx_pro import (
    GEN5,
)
from lab.machines.trees import Build, machine
from metainfer.hardware.cards import card_named
from metainfer.hardware.curves import COPY, FROM_HOST, TO_HOST, Curve
from metainfer.hardware.machine import (
    Machine,
    Source,
)


def h200() -> Machine:
    sizes = (64 * KIB, MIB, 256 * MIB)
    links = {TO_HOST: (7.3, 47.9, 54.9), FROM_HOST: (3.7, 42.6, 52.8)}
    curves = [
        Curve(means, "copy", (0,), False, sizes,
              tuple(round(size / rate / 1e9, 9) for size, rate in zip(sizes, rates, strict=True)), False,
              f"{OWN}: {rates[0]}, {rates[1]} and {rates[2]} GB/s, pinned")
        for means, rates in links.items()
    ]  # fmt: skip
    curves += [at_rate(means, (0,), 41, f"{OWN}, both ways at once", True) for means in links]
    return machine(
        Build(card_named("H200"), "NVIDIA H200", GEN5).direct(1),
        curves,
        [Source("", OWN), Source("gpus.link, cpu, memory, driver, versions", OWN, "memory: of a slice of the host"),
         Source("gpus.parent, bridges", OWN, "at a root port; what is above it a container does not show"),
         Source("curves", "beside each curve")],
        cores=16,
        memory=128 * GIB,
        driver="580",
        versions={"torch": "2.11.0+cu130", "triton": "3.6.0"},
    )  # fmt: skip


def b300() -> Machine:
    sheet = "NVIDIA data sheet of the HGX B300"
    curves = [
        at_rate(COPY, (0, 1), 900, f"{sheet}, nominal rate of NVLink one way, not measured", once)
        for once in (False, True)
    ]
    return machine(
        Build(card_named("B300"), "NVIDIA B300 SXM6 AC", GEN5).direct(4, 0).direct(4, 1),
        curves,
        [
            Source("", sheet, "for comparison: NVLink between all pairs"),
            Source("gpus.link, gpus.parent, bridges", sheet,
                   "to hosts of Gen5, though the cards do Gen6; four cards at each of two processors"),
            Source("curves", "beside each curve"),
        ],
    )  # fmt: skip
