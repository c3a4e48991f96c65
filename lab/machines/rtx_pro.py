"""Recorded machines with RTX PRO 6000 and 6000D."""

from __future__ import annotations

from lab.machines.figures import (
    AIC,
    B12X,
    COPIES,
    FABRIC,
    FEW_MIB,
    GIB,
    KIB,
    MIB,
    ONE_SHOT,
    PRO_AIC,
    VLLM_RFC,
    aic,
    at_rate,
    bus,
    default_nccl,
    ring_of_copies,
    table,
)
from lab.machines.trees import Build, machine
from metainfer.hardware.cards import card_named
from metainfer.hardware.curves import COPY, LOAD, NCCL, STORE, Curve
from metainfer.hardware.machine import (
    Machine,
    PcieLink,
    Source,
)

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
              f"{sglang}: 45 us at 4 KiB, 344 at 64; inferred of another machine: 24.7 GB/s on the bus at 512 MiB"
              f" as {AIC} have it for 8 RTX PRO 6000"),
        *[table(NCCL, range(n), aic(n, PRO_AIC[n]), f"{AIC}, {n} of 8 RTX PRO 6000 Server Edition;"
                " inferred of another machine: the same links") for n in (2, 4)],
        *[Curve(c.means, c.operation, c.gpus, c.at_once, c.bytes, c.seconds, False,
                f"{c.source}; of RTX PRO 6000, inferred of another machine: the same links") for c in PRO_PAIR],
        at_rate(COPY, (0, 4), 50.5, f"{FABRIC}, RTX PRO 6000 across sockets;"
                " inferred of another machine: the same links"),
        at_rate(COPY, EIGHT, 49.6, f"{COPIES}, 8 sm_120 cards in a ring;"
                " inferred of another machine: the same links", True, "ring"),
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
