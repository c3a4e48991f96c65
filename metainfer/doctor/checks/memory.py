"""Memory: whether a model fits, in which plain layouts, and how much is left for contexts."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.core.units import format_bytes
from metainfer.doctor.estimate import tensor_layouts, tensor_sizes, workload_of
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import gpus_of
from metainfer.plan.layouts import Formats
from metainfer.plan.ledger_ranks import RankLedgers, most_context, most_sequences
from metainfer.plan.rank_lines import RankLedger

_LEDGER = "memory ledger"
_LATE = "memory taken after sizing"
_HOST = "host memory of the model"


def ledger(patient: Patient) -> Iterator[Finding]:
    """Tensor parallelism of each size that there are cards for, in the released formats."""
    shape, machine = patient.shape, patient.machine
    gpus = gpus_of(machine)
    if shape is None or not gpus:
        return
    ledgers, work = RankLedgers(), workload_of(shape)
    fitting, refused = [], []
    for size in tensor_sizes(shape, len(gpus)):
        layouts = tensor_layouts(size, len(gpus))
        found = ledgers(shape, machine, layouts, work, Formats())
        if found.fits:
            asked = (shape, machine, layouts, work, Formats())
            fitting.append(
                f"{layouts.decode.name}: {format_bytes(found.total_bytes)} of"
                f" {format_bytes(found.limit_bytes)}, contexts to {most_context(*asked):,} tokens,"
                f" {most_sequences(*asked):,} sequences of {work.longest_context:,}"
            )
        else:
            refused.append((layouts.decode.name, found))
    if fitting:
        yield Finding(
            _LEDGER, Level.OK,
            f"{shape.name} fits as " + ", ".join(told.partition(":")[0] for told in fitting),
            "; ".join([*fitting, *(f"not as {name}: {found.reason}" for name, found in refused)]),
        )  # fmt: skip
    elif refused:
        yield _nothing_fits(shape.name, len(gpus), *refused[-1])


def _nothing_fits(model: str, gpus: int, name: str, found: RankLedger) -> Finding:
    largest = sorted(found.lines, key=lambda line: -line.bytes)[:3]
    return Finding(
        _LEDGER,
        Level.WARN,
        f"{model} as released does not fit on "
        + ("this card" if gpus == 1 else f"these {gpus} cards with tensor parallelism alone"),
        f"{name}: " + ", ".join(f"{line.name} {format_bytes(line.bytes)}" for line in largest)
        + f", in all {format_bytes(found.total_bytes)} of {format_bytes(found.limit_bytes)} a card",
        "a server would load for minutes and then end with out of memory",
        f"{found.reason}; `metainfer plan` looks at all other layouts",
    )  # fmt: skip


def late(patient: Patient) -> Iterator[Finding]:
    """What other engines take behind the back of their profiler."""
    shape, machine = patient.shape, patient.machine
    gpus = gpus_of(machine)
    if shape is None or not gpus:
        return
    sizes = tensor_sizes(shape, len(gpus))
    ledgers, work = RankLedgers(), workload_of(shape)
    for size in sizes:
        found = ledgers(shape, machine, tensor_layouts(size, len(gpus)), work, Formats())
        if not found.fits:
            continue
        late_bytes = sum(
            found.bytes_of(name)
            for name in ("graph pools", "communication", "indexer scratch", "kernels")
        )
        tight = found.free_bytes < found.limit_bytes // 10
        yield Finding(
            _LATE,
            Level.WARN if tight else Level.OK,
            f"graphs, exchanges and scratch take {format_bytes(late_bytes)} a card of"
            f" {shape.name} as TP{size}" + (", which hardly fits" if tight else ""),
            f"{format_bytes(found.free_bytes)} are free for more contexts beside"
            f" {work.requests_at_once} of {work.longest_context:,} tokens",
            "engines that size caches before they tune and capture end in their first long prompt:"
            " FlashInfer's tuner takes 0.5 GiB with 1,024 rows a step and 1.5 with 8,192"
            if tight
            else "",
            "give --gpu-memory-utilization 0.90 or less, chunks of 2,048 rows (they cost about a"
            " tenth of prefill), and send one prompt of the longest length before any user does"
            if tight
            else "",
            "github.com/local-inference-lab/rtx6kpro, optimization/kv-cache-budgeting-sm120",
        )
        return


def host(patient: Patient) -> Iterator[Finding]:
    """Engram tables lie in host memory, once for all ranks."""
    shape, machine = patient.shape, patient.machine
    gpus = gpus_of(machine)
    if shape is None or shape.engram is None or not gpus:
        return
    sizes = tensor_sizes(shape, len(gpus))
    found = RankLedgers()(
        shape,
        machine,
        tensor_layouts(sizes[-1], len(gpus)),
        workload_of(shape),
        Formats(engram="host"),
    )
    total = machine.memory.total_bytes
    there = total.why if isinstance(total, Unknown) else format_bytes(total)
    evidence = f"tables {format_bytes(found.host_bytes)}, host memory {there}"
    if found.host_limit_bytes is None:
        yield Finding(_HOST, Level.UNKNOWN, "whether the n-gram tables fit is not known", evidence)
    elif found.host_bytes <= found.host_limit_bytes:
        yield Finding(_HOST, Level.OK, "the n-gram tables fit into host memory", evidence)
    else:
        yield Finding(
            _HOST,
            Level.FAIL,
            "the n-gram tables do not fit into host memory",
            evidence,
            "a server that pins them is ended by the system while it loads",
            "keep them on an NVMe disk with a bounded cache of rows (40 GiB were enough), or on"
            " the cards where the ledger has room",
            "github.com/0xSero/local-ai-registry/pull/55",
        )


CHECKS = (
    Check(_LEDGER, "Does the model fit, and in which plain layouts?", ledger),
    Check(_LATE, "Is room left for what is allocated after caches were sized?", late),
    Check(_HOST, "Does the host hold what the model keeps there?", host),
)
