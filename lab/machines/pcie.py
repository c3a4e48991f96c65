"""Recorded machines with other cards linked by PCIe: Ada and Ampere, and consumer cards without P2P."""

from __future__ import annotations

from collections.abc import Sequence

from lab.machines.figures import (
    A800,
    AIC,
    COPIES,
    FEW_MIB,
    KIB,
    L40S_AIC,
    MIB,
    NO_P2P,
    aic,
    at_rate,
    bus,
    ring_of_copies,
    table,
)
from lab.machines.rtx_pro import (
    EIGHT,
    FOUR,
    GEN4,
    kib,
)
from lab.machines.trees import Build, machine
from metainfer.hardware.cards import card_named
from metainfer.hardware.curves import COPY, FROM_HOST, NCCL, STAGED, STORE, TO_HOST
from metainfer.hardware.machine import (
    Machine,
    Source,
)


def islands_gen4(card: str, driver_name: str, count: int, sources: Sequence[Source], same: str = "") -> Machine:
    """L40S, or cards on the same boards, four at each processor."""
    counts = [n for n in (8, 4, 2) if n <= count]
    curves = [table(NCCL, range(n), aic(n, L40S_AIC[n]), f"{AIC}, {n} of 8 L40S{same}") for n in counts]
    floors = {4: 5932, 8: 8532}
    curves += [
        table(COPY, range(n), {6 * MIB: ring_of_copies(n, us), 96 * MIB: us}, f"{COPIES}, L40S{same}; {FEW_MIB}")
        for n, us in floors.items()
        if n <= count
    ]
    curves += [
        at_rate(COPY, (0, 1), 26.3, f"{COPIES}, L40S, one hop{same}"),
        at_rate(COPY, FOUR, 25.4, f"{COPIES}, L40S, 4 of one processor in a ring{same}", True, "ring"),
    ]
    if count == 8:
        curves += [
            at_rate(COPY, EIGHT, 20.8, f"{COPIES}, L40S, 8 in a ring{same}", True, "ring"),
            at_rate(COPY, (0, 4), 9.7, f"{COPIES}, L40S, all crossing sockets at once{same}", True),
        ]
    build = Build(card_named(card), driver_name, GEN4).direct(4, 0)
    return machine(
        build.direct(4, 1) if count == 8 else build, curves, [*sources, Source("curves", "beside each curve")]
    )


def l40s(count: int) -> Machine:
    half = "" if count == 8 else "one processor of such a box: four of its eight cards; "
    return islands_gen4("L40S", "NVIDIA L40S", count, [
        Source("", COPIES, f"{half}boxes of one kind"),
        Source("gpus.link, gpus.parent, bridges", COPIES, "Gen4 x16; each card at a root port, four a processor"),
    ])  # fmt: skip


def l20() -> Machine:
    return islands_gen4("L20", "NVIDIA L20", 8, [
        Source("", "TensorRT-LLM, lowprecision-pcie-allreduce.md: L20 in two NUMA nodes of four"),
        Source("gpus.link, gpus.parent, bridges", "TensorRT-LLM, lowprecision-pcie-allreduce.md",
               "Gen4 x16; each card at a root port, four a processor"),
    ], "; inferred of another machine: L20 on such boards have the same links")  # fmt: skip


def a100() -> Machine:
    sizes = (8, 32, 128, 256, 512)
    found = {
        (NCCL, "all_reduce"): (57, 96, 132, 169, 160),
        (STORE, "all_reduce"): (47, 46, 102, 175, 324),
        (STORE, "all_reduce_two_islands"): (48, 47, 67, 91, 143),
    }
    curves = [
        table(means, EIGHT, kib(dict(zip(sizes, us, strict=True))), A800, operation)
        for (means, operation), us in found.items()
    ]
    curves += [
        at_rate(COPY, (0, 1), 26, "measured one way over Gen4 x16 on L40S, RTX 4090 and A100 alike (FlashInfer pull"
                " 4870, SGLang pull 39605)"),
        at_rate(COPY, (0, 4), 9.7, f"{COPIES}, L40S, all crossing sockets at once;"
                " inferred of another machine: the same links", True),
    ]  # fmt: skip
    return machine(
        Build(card_named("A100 80GB PCIe"), "NVIDIA A100 80GB PCIe", GEN4).direct(4, 0).direct(4, 1),
        curves,
        [
            Source("", A800, "the A800 is an A100 but for its NVLink, which is not used here"),
            Source("gpus.link, gpus.parent, bridges", A800, "islands of four, so four cards at each of two processors"),
            Source("nvlink", "none", "cards without bridges between them"),
            Source("curves", "beside each curve", "nothing above 512 KiB is published"),
        ],
    )


# ---- without P2P ----


def rtx_4090() -> Machine:
    steps, big = 6, 20e6
    curves = [
        table(NCCL, FOUR, {8 * KIB: 39 * steps / 2, big: bus(1.9, 4, big), 256 * MIB: bus(1.9, 4, 256 * MIB)},
              f"inferred from {NO_P2P}: through host memory 39 us for 2 steps, so thrice that for 6, and 1.9 GB/s on"
              " the bus; no table of 4 RTX 4090 is published"),
        at_rate(TO_HOST, (0,), 26, f"{NO_P2P}; inferred of another machine: the same links"),
        at_rate(FROM_HOST, (0,), 26, f"{NO_P2P}; inferred of another machine: the same links"),
    ]  # fmt: skip
    return machine(
        Build(card_named("RTX 4090"), "NVIDIA GeForce RTX 4090", GEN4).direct(4),
        curves,
        [
            Source("", "github.com/tinygrad/open-gpu-kernel-modules, issues 17 and 45", "a common box: one processor"),
            Source("gpus.link, gpus.parent, bridges", "NVIDIA data sheet of the card",
                   "Gen4 x16; each card at a root port of one server processor"),
            Source("curves", "beside each curve"),
        ],
    )  # fmt: skip


def rtx_5070ti() -> Machine:
    big, most = 20e6, 256 * MIB
    curves = [
        table(NCCL, (0, 1), {8 * KIB: 39, big: 10900, most: round(10900 * most / big)},
              f"{NO_P2P}: 39 us in decode, 10.9 ms for 20 MB; inferred: beyond at that rate"),
        table(STAGED, (0, 1), {8 * KIB: 81, big: bus(12.5, 2, big), most: bus(12.5, 2, most)},
              f"{NO_P2P}: NCCL with copies through host memory, 12.5 GB/s and 81 us in decode; not in NCCL 2.30"),
        at_rate(TO_HOST, (0,), 26, NO_P2P),
        at_rate(FROM_HOST, (0,), 26, NO_P2P),
    ]  # fmt: skip
    return machine(
        Build(card_named("RTX 5070 Ti"), "NVIDIA GeForce RTX 5070 Ti", GEN4).direct(2),
        curves,
        [
            Source("", NO_P2P),
            Source("gpus.link, gpus.parent, bridges", NO_P2P,
                   "slots of Gen4 x16 for cards of Gen5; each at a root port of one processor"),
            Source("curves", "beside each curve"),
        ],
    )  # fmt: skip
