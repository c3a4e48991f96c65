"""NCCL: what it assumes of a machine, held against the tree and against measured curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from metainfer.arch.shapes import ModelShape
from metainfer.doctor.estimate import STOCK, predicted, tensor_sizes, told
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.curves import COPY, LOAD, NCCL, STORE, Curve, trusted
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.hardware.topology import p2p_everywhere, way
from metainfer.plan.cost.constants import read_constants
from metainfer.plan.cost.links import Links

_LEVEL = "NCCL's peer level"
_BUS = "NCCL against the links"
_HOST = "NCCL's idea of the host"
_DECODE = "exchanges of a decode step"

_ENOUGH = 0.6
"""Of the narrowest link: with channels and protocol set NCCL reaches 0.7."""
_AMD_BYTES_PER_S = 16e9
"""What NCCL 2.30.7 counts for the way between AMD processors and their devices, whatever it is."""
_REACHES_ALL = frozenset({"SYS", "4", "5"})
_REACHES_ROOTS = frozenset({"PHB", "3"})

_USUAL_S = 35e-6
"""Of a row by NCCL over peer access at most; 20 to 27 us over eight cards are usual."""
_FEWER_EXCHANGES = (
    "without peer access: fewer ranks with pipeline stages, and speculation, which has more rows an"
    " exchange"
)
_SMALL_EXCHANGES = (
    "an exchange in one kernel for messages below 64 to 120 KB (vLLM and SGLang leave it out for"
    " more than two cards without NVLink; FlashInfer's PCIe IPC collectives or B12X have it); fewer"
    " ranks; speculation, which has more rows an exchange"
)

_NCCL = "github.com/NVIDIA/nccl 2.30.7, src/graph/paths.cc"
_WIKI = "github.com/local-inference-lab/rtx6kpro, hardware/pcie-bandwidth"
_TUNED = "NCCL_P2P_LEVEL=SYS NCCL_MIN_NCHANNELS=8 NCCL_PROTO=LL,LL128,Simple"


def level(patient: Patient) -> Iterator[Finding]:
    """By default NCCL takes peer access across switches alone, but on AMD hosts everywhere."""
    machine = patient.machine
    gpus = gpus_of(machine)
    if len(gpus) < 2 or machine.nvlink is True or p2p_everywhere(machine) is not True:
        return
    ways = {(a, b): way(machine, a, b) for a in range(len(gpus)) for b in range(a + 1, len(gpus))}
    if any(isinstance(one, Unknown) for one in ways.values()):
        return
    apart = [pair for pair, one in ways.items() if not isinstance(one, Unknown) and not one.meets]
    across = [p for p in apart if _crosses(ways[p])]
    if not apart:
        yield Finding(_LEVEL, Level.OK, "all pairs meet at a switch, where NCCL takes peer access",
                      f"{len(ways)} pairs")  # fmt: skip
        return
    given = machine.environment.get("NCCL_P2P_LEVEL", "").strip().upper()
    if given in _REACHES_ALL or (given in _REACHES_ROOTS and not across):
        yield Finding(_LEVEL, Level.OK, f"NCCL_P2P_LEVEL={given} takes peer access for all pairs",
                      f"{len(apart)} pairs meet at the processor")  # fmt: skip
        return
    amd = machine.cpu.of_amd
    if amd is True and not given:
        yield Finding(_LEVEL, Level.OK, "on an AMD host NCCL takes peer access for all pairs",
                      f"{machine.cpu.model}")  # fmt: skip
        return
    sure = amd is not None
    yield Finding(
        _LEVEL,
        Level.WARN if sure else Level.UNKNOWN,
        f"{len(apart)} of {len(ways)} pairs meet at the processor, and NCCL sends what they tell"
        " each other through host memory" + ("" if sure else ", unless the processor is AMD's"),
        f"processor {_cpu(machine)}; NCCL_P2P_LEVEL={given or 'not set'}",
        "through host memory NCCL was measured at 1.9 GB/s, over peer access at 22 to 41",
        "export NCCL_P2P_LEVEL=SYS, and look for 'via P2P' in a log with NCCL_DEBUG=INFO",
        f"{_NCCL}; github.com/sgl-project/sglang/pull/39605; {_WIKI}",
    )


def bus(patient: Patient) -> Iterator[Finding]:
    """All-reduces of megabytes: NCCL's rate on the bus against what the links give a ring."""
    machine = patient.machine
    if machine.nvlink is True:
        return
    links = Links(machine, read_constants())
    if not links.p2p_all():
        yield from _through_host(patient, links)
        return
    widest = max((len(c.gpus) for c in _reduces(machine)), default=0)
    for curve in _reduces(machine):
        ranks = len(curve.gpus)
        if ranks != widest or curve.bytes[-1] < 2**24:
            continue  # smaller messages are bound by steps, not links
        reached = _on_the_bus(curve)
        ring = links.ring(ranks, 1)
        evidence = (
            f"all-reduce of {curve.bytes[-1] / 2**20:,.0f} MiB over {ranks} cards:"
            f" {reached / 1e9:.1f} GB/s on the bus, {ring / 1e9:.1f} of the narrowest link;"
            f" {curve.source}"
        )
        if reached >= _ENOUGH * ring:
            yield Finding(_BUS, Level.OK, f"NCCL reaches {reached / ring:.0%} of the links",
                          evidence)  # fmt: skip
            return
        yield Finding(
            _BUS,
            Level.FAIL if reached < 0.15 * ring else Level.WARN,
            f"NCCL over {ranks} cards reaches {reached / ring:.0%} of what the links give",
            evidence,
            _worth(patient, ranks)
            or f"all-reduces of prefill take {ring / reached:.1f} times as long as they could",
            f"export {_TUNED}, and measure: 8 channels gave 38 in place of 22 GB/s on two"
            " sockets; LL128 needs a platform that keeps the order of 128-byte stores, so compare"
            " results; on two islands of cards a ring of copies or smaller groups with replicas",
            f"{_WIKI}; {_NCCL}; github.com/flashinfer-ai/flashinfer/pull/4870",
        )
        return  # the first curve fits the machine best


def _through_host(patient: Patient, links: Links) -> Iterator[Finding]:
    """Without peer access NCCL's kernels read host memory in small pieces."""
    machine = patient.machine
    for curve in _reduces(machine):
        ranks, reached = len(curve.gpus), _on_the_bus(curve)
        could = links.staged
        if curve.bytes[-1] < 2**24 or reached >= _ENOUGH * could:
            continue
        yield Finding(
            _BUS,
            Level.FAIL if reached < 0.15 * could else Level.WARN,
            f"NCCL through host memory reaches {reached / could:.0%} of what copies through it do",
            f"{reached / 1e9:.1f} GB/s on the bus of {ranks} cards, links to the host give"
            f" {could / 1e9:.1f} both ways; {curve.source}",
            _worth(patient, ranks)
            or "733 of 802 ms of a step of 2,048 rows were all-reduces on two cards",
            "pipeline stages in place of tensor parallelism (--pipeline-parallel-size; thirty times"
            " fewer bytes over each link); SGLang with pull 39605, which stages with copies;"
            " NCCL_SHM_USE_CUDA_MEMCPY=1 with NCCL before 2.30 for prompts, not for decode, whose"
            " exchanges it doubles",
            "github.com/sgl-project/sglang/pull/39605",
        )
        return


def host(patient: Patient) -> Iterator[Finding]:
    """NCCL counts 16 GB/s for AMD processors, and then prefers worse ways."""
    machine = patient.machine
    gpus = gpus_of(machine)
    if len(gpus) < 2 or machine.nvlink is True or machine.cpu.of_amd is not True:
        return
    rates = [
        rate
        for gpu in gpus
        if not isinstance(gpu.link, Unknown)
        and not isinstance(rate := gpu.link.bytes_per_s(), Unknown)
    ]
    if not rates or min(rates) <= _AMD_BYTES_PER_S:
        return
    slow = [c for c in _reduces(machine) if _on_the_bus(c) < 2 * _AMD_BYTES_PER_S]
    measured = f"; {len(slow)} measured curves stay below 32 GB/s" if slow else ""
    yield Finding(
        _HOST,
        Level.WARN if slow else Level.UNKNOWN,
        f"NCCL counts 16 GB/s for this processor, and links give {min(rates) / 1e9:.0f}",
        f"{_cpu(machine)}{measured}",
        "ways and channels are chosen by that: a prompt of 8,192 tokens of Kimi took 9.14 s, and"
        " 1.07 s with the number mended",
        "a build of NCCL with pull 2127, or NCCL_TOPO_FILE with the true rate between processor"
        " and cards (NCCL_TOPO_DUMP_FILE=topo.xml writes what it believes)",
        "github.com/NVIDIA/nccl/pull/2127",
    )


def decode(patient: Patient) -> Iterator[Finding]:
    """Two all-reduces a layer of a few kilobytes: what a token waits for."""
    shape, machine = patient.shape, patient.machine
    if shape is None or machine.nvlink is True:
        return
    size = 2 * shape.side.hidden_size
    for ranks in reversed(tensor_sizes(shape, len(gpus_of(machine)))):
        known = [c for c in _reduces(machine) if len(c.gpus) == ranks and c.bytes[0] <= 4 * size]
        if not known:
            continue
        nccl = known[0]
        others = [
            c
            for c in trusted(machine.curves)
            if c.means in (STORE, LOAD, COPY)
            and c.operation == "all_reduce"
            and len(c.gpus) == ranks
            and c.bytes[0] <= 4 * size
        ]
        peers = p2p_everywhere(machine) is not False
        yield from _decode(shape, ranks, nccl, others, peers)
        return


def _decode(
    shape: ModelShape, ranks: int, nccl: Curve, others: list[Curve], peers: bool
) -> Iterator[Finding]:
    exchanges, size = 2 * shape.num_layers, 2 * shape.side.hidden_size
    rows = {count: nccl.seconds_of(count * size) for count in (1, 16, 64)}
    told_rows = ", ".join(
        f"{seconds * 1e6:.0f} us with {count} {'row' if count == 1 else 'rows'}"
        for count, seconds in rows.items()
    )
    step_ms = exchanges * rows[1] * 1e3
    best = min(others, key=lambda c: c.seconds_of(size), default=None)
    slow = rows[1] > (_USUAL_S if best is None else 2 * best.seconds_of(size))
    other = (
        "one exchange by stores in a kernel was measured at 7.5 to 12 us between peers"
        if best is None
        else f"{best.means}s in one kernel take {best.seconds_of(size) * 1e6:.0f} us here"
    )
    yield Finding(
        _DECODE,
        Level.WARN if slow else Level.OK,
        f"NCCL's exchanges take {step_ms:.1f} ms of every decode step of {shape.name} with"
        f" TP{ranks}",
        f"NCCL over {ranks} cards: {told_rows}; {exchanges} exchanges a step",
        f"at most {1e3 / step_ms:,.0f} tokens a second for one request, before anything is"
        f" computed; {other}"
        if slow
        else "",
        "" if not slow else _SMALL_EXCHANGES if peers else _FEWER_EXCHANGES,
        "github.com/flashinfer-ai/flashinfer/pull/4393;"
        " github.com/local-inference-lab/rtx6kpro, optimization/pcie-oneshot-allreduce",
    )


def _worth(patient: Patient, ranks: int) -> str:
    """Prefill with NCCL as it comes and tuned; "" without a model."""
    shape, machine = patient.shape, patient.machine
    if shape is None or ranks not in tensor_sizes(shape, len(gpus_of(machine))):
        return ""
    stock = read_constants().profile(STOCK)
    tuned = replace(stock, collectives=("nccl", "staged", "one shot of two", "nvlink"))
    before = predicted(shape, machine, ranks, stock)
    after = predicted(shape, machine, ranks, tuned)
    if before is None or after is None:
        return ""
    share = before.prefill.by_group().get("transfers", 0.0) / before.prefill.seconds
    return (
        f"{share:.0%} of prefill of {shape.name} with TP{ranks} go into exchanges:"
        f" {told(before, after, 'with better exchanges')}"
    )


def _reduces(machine: Machine) -> list[Curve]:
    return [c for c in trusted(machine.curves) if (c.means, c.operation) == (NCCL, "all_reduce")]


def _on_the_bus(curve: Curve) -> float:
    """Bytes a second that each rank sends, of the largest message."""
    ranks = len(curve.gpus)
    return 2 * (ranks - 1) / ranks * curve.bytes[-1] / curve.seconds[-1]


def _crosses(between: object) -> bool:
    return getattr(between, "crosses_sockets", False) is True


def _cpu(machine: Machine) -> str:
    model = machine.cpu.model
    return "unknown" if isinstance(model, Unknown) else model


CHECKS = (
    Check(_LEVEL, "Does NCCL use the peer access that there is?", level),
    Check(_BUS, "Does NCCL's ring reach what the links give?", bus),
    Check(_HOST, "Does NCCL know how fast the processor's links are?", host),
    Check(_DECODE, "How long does a decode step wait for exchanges?", decode),
)
