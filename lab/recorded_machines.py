"""Writes the recorded machines, metainfer/hardware/machines/*.json, from the tables below.

    PYTHONPATH=. python lab/recorded_machines.py [--check]

With --check nothing is written; exit code 1 where a file is not what this would write.

A figure stands beside its source; what is arithmetic or was concluded says so. Of several curves of
the same means, operation and GPUs the first is the one that fits the machine best.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from metainfer.hardware.cards import Card, card_named
from metainfer.hardware.curves import COPY, FROM_HOST, LOAD, NCCL, STAGED, STORE, TO_HOST, Curve
from metainfer.hardware.facts import plain
from metainfer.hardware.machine import (
    MACHINE_VERSION,
    Bridge,
    Cpu,
    Gpu,
    Host,
    Machine,
    Memory,
    NumaNode,
    PcieLink,
    Peer,
    Power,
    Source,
    Unknown,
)

OUT = Path(__file__).parents[1] / "metainfer/hardware/machines"
KIB, MIB, GIB = 2**10, 2**20, 2**30
NOT_SAID = Unknown("the source does not say")

WIKI = "github.com/local-inference-lab/rtx6kpro"
FABRIC = f"{WIKI}, hardware/pcie-bandwidth.md"
ONE_SHOT = f"{WIKI}, optimization/pcie-oneshot-allreduce.md"
AIC = "AIConfigurator's NCCL tables (github.com/ai-dynamo/aiconfigurator), NCCL as it comes, bf16"
COPIES = "github.com/flashinfer-ai/flashinfer, pull 4870"
B12X = "github.com/local-inference-lab/b12x, docs: PCIe calibration probe (July 2026), 8 RTX PRO 6000, one processor"
VLLM_RFC = "github.com/vllm-project/vllm, issue 56128, 4 RTX PRO 6000 Server Edition"
A800 = "github.com/vllm-project/vllm, pull 50941, 8 A800 PCIe"
NO_P2P = "github.com/sgl-project/sglang, pull 39605, 2 RTX 5070 Ti at Gen4 x16"
OWN = "metainfer, one H200 (December 2026)"
STAND_IN = "cpu: cores are not published; two a GPU stand in, and no figure of the GPUs rests on them"


# ---- curves ----


def table(
    means: str, gpus: Iterable[int], points: dict[float, float], source: str, operation: str = "all_reduce"
) -> Curve:
    """Of a collective: {bytes: us}."""
    sizes = tuple(map(int, points))
    return Curve(means, operation, tuple(gpus), True, sizes, tuple(us / 1e6 for us in points.values()), False, source)


def at_rate(
    means: str, gpus: Iterable[int], gb_per_s: float, source: str, at_once: bool = False, operation: str = "copy"
) -> Curve:
    """Of one published rate: 10 us and the bytes at that rate."""
    sizes = tuple(size * KIB for size in (64, 1024, 16 * 1024, 256 * 1024))
    seconds = tuple(round(10e-6 + size / (gb_per_s * 1e9), 9) for size in sizes)
    said = f"{source}: {gb_per_s:g} GB/s; inferred: 10 us a copy, as one of 64 KiB takes on an H200"
    return Curve(means, operation, tuple(gpus), at_once, sizes, seconds, False, said)


def bus(gb_per_s: float, ranks: int, size: float) -> float:
    """us of an all-reduce at a bus bandwidth as nccl-tests count it."""
    return round(size * 2 * (ranks - 1) / ranks / gb_per_s / 1e3, 1)


FEW_MIB = "inferred: 6 MiB as its steps of 24 us, of which B12X's 343 us are 14, and the bytes at that rate"


def ring_of_copies(ranks: int, us_of_96_mib: float) -> float:
    """us of an all-reduce of 6 MiB."""
    return round(2 * (ranks - 1) * 24 + us_of_96_mib / 16)


def aic(ranks: int, us: Sequence[float]) -> dict[float, float]:
    return dict(zip((8 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 512 * MIB), us, strict=True))


PRO_AIC = {
    2: (6.8, 9.2, 44, 474, 1840, 13900),
    4: (13.5, 16.9, 86, 1008, 4032, 30500),
    8: (26.7, 34, 132, 1248, 4927, 38100),
}
L40S_AIC = {
    2: (6, 12.6, 75, 850, 3359, 26700),
    4: (12, 32, 268, 4922, 19699, 156000),
    8: (23, 164, 863, 19376, 55412, 649000),
}


def default_nccl(tables: dict[int, tuple[float, ...]], card: str, counts: Sequence[int]) -> list[Curve]:
    return [table(NCCL, range(n), aic(n, tables[n]), f"{AIC}, {n} of 8 {card}") for n in counts]


# ---- trees ----


@dataclass
class Build:
    """A machine before its curves: roots, what hangs at them, and where cards are."""

    card: Card
    driver_name: str
    link: PcieLink
    bridges: list[Bridge] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)  # (parent, NUMA node) of each GPU

    def direct(self, count: int, node: int = 0) -> Build:
        """Cards at root ports of their own."""
        for _ in range(count):
            name = f"root {len([b for b in self.bridges if b.kind == 'root'])}"
            self.bridges.append(Bridge(name, "root", None, node))
            self.places.append((name, node))
        return self

    def switched(self, count: int, each: int, node: int = 0) -> Build:
        """`count` switches at roots of their own, `each` cards below."""
        for _ in range(count):
            number = len([b for b in self.bridges if b.kind == "root"])
            self.bridges.append(Bridge(f"root {number}", "root", None, node))
            self.bridges.append(Bridge(f"switch {number}", "switch", f"root {number}", node, self.link, False))
            self.places += [(f"switch {number}", node)] * each
        return self

    def gpus(self) -> tuple[Gpu, ...]:
        card = self.card
        return tuple(
            Gpu(
                self.driver_name, card.capability, card.memory_bytes, card.memory_bytes,
                multiprocessors=card.multiprocessors, shared_block_bytes=card.shared_block_bytes,
                memory_bytes_per_s=card.memory_bytes_per_s, parent=parent, numa_node=node, link=self.link,
                power=Power(card.power_w, card.power_w), mig=False, throttle=(), processes=(),
            )
            for parent, node in self.places
        )  # fmt: skip

    def peers(self) -> tuple[Peer, ...]:
        count = range(len(self.places))
        why = "" if self.card.p2p else self.card.p2p_why
        return tuple(Peer(a, b, self.card.p2p, why) for a in count for b in count if a != b)


def machine(
    build: Build,
    curves: Sequence[Curve],
    sources: Sequence[Source],
    *,
    cpu: str | Unknown = NOT_SAID,
    cores: int | None = None,
    memory: int | Unknown = NOT_SAID,
    memory_rate: float | Unknown = NOT_SAID,
    board: str | Unknown = NOT_SAID,
    iommu: str | Unknown = NOT_SAID,
    hmm: bool | Unknown = NOT_SAID,
    driver: str | Unknown = NOT_SAID,
    versions: dict[str, str] | None = None,
) -> Machine:
    """Card and cores add their sources to those given."""
    nodes = sorted({node for _, node in build.places})
    named = {source.fields for source in sources}
    more = [
        Source(
            "gpus.memory_bytes, gpus.multiprocessors, gpus.shared_block_bytes, gpus.memory_bytes_per_s, gpus.power",
            f"cards.json: {build.card.name}",
            "free_bytes, throttle, processes: of a card that is idle",
        ),
        Source("rates", f"cards.json: {build.card.name}", "" if build.card.rates else "none is published"),
        Source("peers", f"cards.json: {build.card.name}", "the same for all pairs"),
    ]
    if cores is None:
        more.append(Source("cpu.physical_cores, cpu.logical_cores", "none", STAND_IN))
    count = cores or 2 * len(build.places)
    return Machine(
        system="Linux x86_64",
        cpu=Cpu(cpu, count, 2 * count if cores else count, None, NOT_SAID),
        memory=Memory(memory, memory, None),
        gpus=build.gpus(),
        driver=driver,
        versions=versions or {},
        host=Host(
            board=board,
            sockets=len(nodes),
            numa_nodes=tuple(NumaNode(node, (), NOT_SAID) for node in nodes),
            memory_bytes_per_s=memory_rate,
            iommu=iommu,
            hmm=hmm,
            kernel_parameters=NOT_SAID,
            relaxed_p2p=NOT_SAID,
        ),
        bridges=tuple(build.bridges),
        peers=build.peers(),
        nvlink=build.card.nvlink_bytes_per_s > 0 and len(build.places) > 1,
        curves=tuple(curves),
        rates=build.card.rates,
        sources=(*sources, *(one for one in more if one.fields not in named)),
    )


# ---- RTX PRO 6000 ----

GEN5, GEN4 = PcieLink(5, 16, 5, 16), PcieLink(4, 16, 4, 16)
PRO, PRO_NAME = card_named("RTX PRO 6000"), "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
PRO_SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
EIGHT, FOUR = range(8), range(4)
PRO_PAIR = [
    at_rate(COPY, (0, 1), 54.5, f"{FABRIC}, one way, 53 to 56"),
    at_rate(COPY, (0, 1), 53.5, f"{FABRIC}, each way of both, 103 to 111 together", True),
]
FOUR_CARDS = {
    NCCL: {1: 13.5, 8: 13.9, 16: 14.7, 32: 15.6, 128: 24.7, 256: 40.9, 512: 71.7, 1024: 85.2},
    STORE: {1: 6.1, 8: 6.4, 16: 7.7, 32: 9.2, 64: 11.8, 128: 17.6, 256: 28.7, 512: 51.0, 1024: 95.6},
}


def kib(points: dict[float, float]) -> dict[float, float]:
    return {size * KIB: us for size, us in points.items()}


def pro_x8() -> Machine:
    rows = (1, 8, 32, 128, 512, 2048, 8192)
    probe = {
        NCCL: (59.7, 61.6, 75.0, 123, 294, 941, 3653),
        COPY: (343, 351, 342, 343, 404, 884, 3283),
    }
    curves = [table(means, EIGHT, {row * 12 * KIB: us for row, us in zip(rows, values, strict=True)}, B12X)
              for means, values in probe.items()]  # fmt: skip
    b12x = "github.com/local-inference-lab/b12x, 8 RTX PRO 6000 behind switches, hidden size 6,144"
    curves += [
        table(STORE, EIGHT, kib({12: 10.0, 96: 31.9}), b12x),
        table(STORE, EIGHT, kib({12: 12.3, 48: 21.1, 96: 33.7}), f"{b12x}; with addition and norm in the kernel",
              "all_reduce_add_norm"),
        table(COPY, EIGHT, {12 * MIB: 428, 48 * MIB: 1631, 96 * MIB: 3237}, b12x),
        *default_nccl(PRO_AIC, "RTX PRO 6000 Server Edition", (2, 4, 8)),
        table(NCCL, EIGHT, {8 * KIB: 26.7, 512 * MIB: bus(40, 8, 512 * MIB)},
              f"{FABRIC}: 39 to 41 GB/s on the bus of a switch box; inferred: at 512 MiB, and below by the 8 KiB of"
              f" {AIC}"),
        *PRO_PAIR,
        at_rate(COPY, FOUR, 52.3, f"{COPIES}, switch pairs, 4 in a ring", True, "ring"),
        at_rate(COPY, EIGHT, 49.6, f"{COPIES}, switch pairs, 8 in a ring", True, "ring"),
        at_rate(COPY, (0, 2), 23.75, f"{COPIES}, switch pairs, all crossing at once", True),
        at_rate(STORE, EIGHT, 22.3, f"{FABRIC}, 164 to 192 together, 3 to 4 switches at one processor; inferred: an"
                " eighth for each card", True, "all_to_all"),
    ]  # fmt: skip
    return machine(
        Build(PRO, PRO_NAME, GEN5).switched(4, 2),
        curves,
        [
            Source("", B12X, "one record of boxes of one kind: 8 cards, one processor, 2 cards a switch"),
            Source("gpus.link, gpus.parent, bridges", B12X,
                   "links of Gen5 x16 above switches too: 23.75 GB/s for each of two cards is half of one"),
            Source("bridges.acs_redirects, host.iommu, host.hmm", FABRIC,
                   "as its recipe has them; with access control on, both ways would give 50 and not 103 GB/s"),
            Source("curves", "beside each curve"),
        ],
        iommu="off",
        hmm=False,
    )  # fmt: skip


def pro_two_sockets() -> Machine:
    small = {0.25: 24.6, 32: 24.5, 64: 24.1, 256: 28.0}
    page = f"{FABRIC}; inferred: of its boxes of 8 that of two sockets, for there 48 to 64 KiB is where NCCL takes over"
    big = 512 * MIB
    curves = [
        table(NCCL, EIGHT, {**kib(small), big: bus(22.2, 8, big)},
              f"{page}; 22.2 GB/s on the bus as it comes, taken at 512 MiB"),
        table(NCCL, EIGHT, {**kib(small), big: bus(37.6, 8, big)},
              f"{page}; 37.6 GB/s on the bus with 8 channels, taken at 512 MiB"),
        table(STORE, EIGHT, kib({0.25: 7.5, 32: 16.5, 64: 25.9, 256: 73.6}), page),
        table(COPY, EIGHT, {96 * KIB: 343, 6 * MIB: 404, 24 * MIB: 884, 96 * MIB: 3549},
              f"{COPIES}: 3,549 us for 96 MiB; inferred: below as {B12X} measured"),
        table(NCCL, FOUR, kib(FOUR_CARDS[NCCL]), f"{ONE_SHOT}, 4 cards, one socket"),
        table(STORE, FOUR, kib(FOUR_CARDS[STORE]), f"{ONE_SHOT}, 4 cards, one socket"),
        *default_nccl(PRO_AIC, "RTX PRO 6000 Server Edition", (2, 4)),
        *PRO_PAIR,
        at_rate(COPY, (0, 4), 50.5, f"{FABRIC}, across sockets (Turin), 50 to 51"),
        at_rate(COPY, (0, 4), 49.5, f"{FABRIC}, across sockets, 99 both ways together; inferred: of one pair", True),
        at_rate(STORE, EIGHT, 6.5, f"{FABRIC}, 52 together on a box of two sockets (Broadcom); inferred: an eighth for"
                " each card", True, "all_to_all"),
    ]  # fmt: skip
    return machine(
        Build(PRO, PRO_NAME, GEN5).direct(4, 0).direct(4, 1),
        curves,
        [
            Source("", FABRIC, "one record of boxes of one kind: 8 cards, two EPYC Turin"),
            Source("gpus.link, gpus.parent, bridges", FABRIC, "four cards at root ports of each processor"),
            Source("host.memory_bytes_per_s", "AMD data sheet of the EPYC 9005",
                   "two sockets, 12 channels each of DDR5-6000"),
            Source("host.iommu, host.hmm", FABRIC, "as its recipe has them"),
            Source("curves", "beside each curve"),
        ],
        cpu="AMD EPYC 9005 (Turin)",
        memory_rate=2 * 12 * 8 * 6000e6,
        iommu="off",
        hmm=False,
    )  # fmt: skip


def pro_few(count: int) -> Machine:
    everyone = range(count)
    curves = list(default_nccl(PRO_AIC, "RTX PRO 6000 Server Edition", [n for n in (4, 2) if n <= count]))
    if count == 4:
        curves = [
            table(NCCL, FOUR, {**kib(FOUR_CARDS[NCCL]), **dict(list(aic(4, PRO_AIC[4]).items())[3:])},
                  f"{ONE_SHOT}, one socket, to 1 MiB (its 71.2 us at 64 KiB left out: out of line); beyond {AIC}"),
            table(STORE, FOUR, kib(FOUR_CARDS[STORE]), f"{ONE_SHOT}, one socket"),
            table(COPY, FOUR, {6 * MIB: ring_of_copies(4, 2886), 96 * MIB: 2886},
                  f"{COPIES}: 2,886 us for 96 MiB; {FEW_MIB}"),
            *curves,
            at_rate(STORE, FOUR, 25.4, f"{VLLM_RFC}, all at once", True, "all_to_all"),
            at_rate(LOAD, FOUR, 20.6, f"{VLLM_RFC}, all at once", True, "all_to_all"),
            at_rate(COPY, FOUR, 52.3, f"{COPIES}, 4 in a ring", True, "ring"),
        ]  # fmt: skip
    else:
        curves.append(table(STORE, everyone, kib({8: 4.2, 128: 8.2, 512: 17.6}),
                            "AIConfigurator's tables (github.com/ai-dynamo/aiconfigurator), vLLM's kernel in a graph; "
                            "inferred: its small time at 8 KiB"))  # fmt: skip
    curves += [
        at_rate(STORE, (0, 1), 44.8, f"{VLLM_RFC}, alone"),
        at_rate(LOAD, (0, 1), 42.8, f"{VLLM_RFC}, alone"),
        *PRO_PAIR,
    ]
    return machine(
        Build(PRO, PRO_SERVER, GEN5).direct(count),
        curves,
        [
            Source("", VLLM_RFC, f"one record of boxes of one kind: {count} cards, one processor"),
            Source("gpus.link, gpus.parent, bridges", FABRIC, "each card at a root port of one processor"),
            Source("host.iommu, host.hmm", FABRIC, "as its recipe has them"),
            Source("curves", "beside each curve"),
        ],
        iommu="off",
        hmm=False,
    )


def d6000_x8() -> Machine:
    sglang = "github.com/sgl-project/sglang, pull 32479, 8 RTX 6000D"
    curves = [
        table(NCCL, EIGHT, {4 * KIB: 45, 64 * KIB: 344, 512 * MIB: bus(24.7, 8, 512 * MIB)},
              f"{sglang}: 45 us at 4 KiB, 344 at 64; inferred: 24.7 GB/s on the bus at 512 MiB as {AIC} have it for"
              " 8 RTX PRO 6000"),
        *[table(NCCL, range(n), aic(n, PRO_AIC[n]), f"{AIC}, {n} of 8 RTX PRO 6000 Server Edition; inferred: the same"
                " links") for n in (2, 4)],
        *[Curve(c.means, c.operation, c.gpus, c.at_once, c.bytes, c.seconds, False,
                f"{c.source}; of RTX PRO 6000, inferred: the same links") for c in PRO_PAIR],
        at_rate(COPY, (0, 4), 50.5, f"{FABRIC}, RTX PRO 6000 across sockets; inferred: the same links"),
        at_rate(COPY, EIGHT, 49.6, f"{COPIES}, 8 sm_120 cards in a ring; inferred: the same links", True, "ring"),
    ]  # fmt: skip
    return machine(
        Build(card_named("RTX 6000D"), "NVIDIA RTX 6000D", GEN5).direct(4, 0).direct(4, 1),
        curves,
        [
            Source("", sglang, "boxes of 8 RTX 6000D are known by what ran on them; how they are wired is inferred"),
            Source("gpus.link, gpus.parent, gpus.numa_node, bridges, host.sockets", "none",
                   "two processors with four cards at root ports of each: 256 logical processors are twice 64 cores,"
                   " and NCCL's 344 us at 64 KiB are of a box whose cards do not all hang at one processor"),
            Source("cpu, memory.total_bytes", "a set-up script of a server of 8 RTX 6000D on GitHub: 256 CPUs, 1.5 TB",
                   "two threads a core"),
            Source("curves", "beside each curve"),
        ],
        cores=128,
        memory=1536 * GIB,
    )  # fmt: skip


# ---- Ada and Ampere ----


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
    ], "; inferred: L20 on such boards have the same links")  # fmt: skip


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
        at_rate(COPY, (0, 4), 9.7, f"{COPIES}, L40S, all crossing sockets at once; inferred: the same links", True),
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
        at_rate(TO_HOST, (0,), 26, f"{NO_P2P}; inferred: the same links"),
        at_rate(FROM_HOST, (0,), 26, f"{NO_P2P}; inferred: the same links"),
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


# ---- for comparison ----


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


MACHINES = {
    "rtx-pro-6000-x8": pro_x8,
    "rtx-pro-6000-x8-two-sockets": pro_two_sockets,
    "rtx-pro-6000-x4": lambda: pro_few(4),
    "rtx-pro-6000-x2": lambda: pro_few(2),
    "rtx-6000d-x8": d6000_x8,
    "l40s-x8": lambda: l40s(8),
    "l40s-x4": lambda: l40s(4),
    "rtx-4090-x4": rtx_4090,
    "rtx-5070ti-x2": rtx_5070ti,
    "a100-pcie-x8": a100,
    "l20-x8": l20,
    "h200-x1": h200,
    "b300-x8": b300,
}


def written(one: Machine) -> str:
    """Its JSON: what is as it would be by itself left out, one record a line."""
    lines = [f'"version": {MACHINE_VERSION}']
    for name, value in short(one).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f'"{name}": [\n    {rows}\n  ]')
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def short(record: Any) -> Any:
    """`plain` without the fields that have their default."""
    if isinstance(record, tuple):
        return [short(item) for item in record]
    if isinstance(record, Unknown) or not hasattr(record, "__dataclass_fields__"):
        return plain(record)
    values = {f.name: getattr(record, f.name) for f in fields(record) if not is_default(record, f)}
    return {name: short(value) for name, value in values.items()}


def is_default(record: Any, f: Any) -> bool:
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return default is not MISSING and getattr(record, f.name) == default


def main() -> int:
    check = "--check" in sys.argv[1:]
    wrong = [path.stem for path in OUT.glob("*.json") if path.stem not in MACHINES]
    for name, make in MACHINES.items():
        path, text = OUT / f"{name}.json", written(make())
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            wrong.append(name)
    if wrong:
        print("not as written by lab/recorded_machines.py: " + ", ".join(sorted(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
