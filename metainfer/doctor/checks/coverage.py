"""Kernels of this engine at the exact shapes of a model, for each layout of the cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from metainfer.core.units import format_count
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import gpus_of
from metainfer.ops.kernel_order import NO_KERNEL

_COVERED = "kernel coverage"
_GATES = "better kernels"
_SHARED = "shared memory"
_RAN = "kernels that ran"

_SHOWN = 6

Report = Mapping[str, Any]


def covered(patient: Patient) -> Iterator[Finding]:
    known = patient.coverage
    if isinstance(known, Unknown):
        yield Finding(_COVERED, Level.UNKNOWN, "what kernels serve the model is not known",
                      known.why)  # fmt: skip
        return
    if not known:
        return
    whole = [ranks for ranks, report in known.items() if not report["uncovered"]]
    if whole:
        reports = [known[ranks] for ranks in whole]
        one = reports[0]
        counts = ", ".join(f"TP{r['tensor_parallel_size']}: {r['covered']}" for r in reports)
        proof = "compiled, and fits" if one.get("compiled", True) else "by what each one takes"
        yield Finding(
            _COVERED,
            Level.OK,
            f"every operation of {one['model']} has a kernel of this engine on {one['target']}"
            f" with {_sizes(whole)}",
            f"{counts} operations at their exact shapes, {proof}",
            fix="" if one.get("compiled", True) else "`metainfer doctor --compile` proves that it"
            " fits the card",
        )  # fmt: skip
    for ranks, report in known.items():
        if report["uncovered"]:
            yield _gap(ranks, report)


def _gap(ranks: int, report: Report) -> Finding:
    bad = [row for row in report["rows"] if not row["ok"]]
    told = [f"{row['phase']} {row['op']}: {'; '.join(row['problems'])}" for row in bad]
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    served = any(row["served"] for row in bad)
    return Finding(
        _COVERED,
        Level.FAIL if ranks == 1 and served else Level.WARN,
        f"{len(bad)} of {len(report['rows'])} operations of {report['model']} have no kernel on"
        f" {report['target']} with TP{ranks}",
        "; ".join(told[:_SHOWN]) + more,
        "each would run as a slow reference, which this engine refuses to do unasked",
        f"`metainfer kernels coverage {report['model']} --tp {ranks} --target"
        f" {report['target']}` says why; try another tensor parallel size",
    )


def gates(patient: Patient) -> Iterator[Finding]:
    """Better implementations that do not take this card or shape, and why."""
    known = patient.coverage
    if not known or isinstance(known, Unknown):
        return
    reasons: dict[str, set[str]] = {}
    for report in known.values():
        for row in report["rows"]:
            for refused in row["refused"]:
                if row["ok"] and refused["reason"] != NO_KERNEL:
                    text = f"{refused['backend']}: {refused['reason']}"
                    reasons.setdefault(text, set()).add(row["op"])
    if not reasons:
        return
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    told = [f"{text} ({', '.join(sorted(ops)[:3])})" for text, ops in ordered[:_SHOWN]]
    yield Finding(
        _GATES,
        Level.OK,
        "some kernels pass over this card or these shapes, and another serves",
        "; ".join(told),
        fix="`metainfer kernels explain OP` has all of them",
    )


def shared(patient: Patient) -> Iterator[Finding]:
    """What code needs of a block's shared memory, against what the card has."""
    known = patient.coverage
    if not known or isinstance(known, Unknown):
        return
    reports = [report for report in known.values() if report.get("compiled", True)]
    limits = [
        gpu.shared_block_bytes
        for gpu in gpus_of(patient.machine)
        if not isinstance(gpu.shared_block_bytes, Unknown)
    ]
    if not reports:
        return
    limit = min([*limits, *(report["shared_limit_bytes"] for report in reports)])
    rows = [(row["shared_bytes"], row["op"]) for report in reports for row in report["rows"]]
    most, op = max(rows, default=(0, ""))
    evidence = f"{op}: {format_count(most)} bytes; a block has {format_count(limit)}"
    if most <= limit:
        yield Finding(_SHARED, Level.OK, "all kernels fit into a block's shared memory", evidence)
        return
    over = sorted({op for size, op in rows if size > limit})
    yield Finding(
        _SHARED,
        Level.FAIL,
        f"{len(over)} operations need more shared memory than this card has",
        f"{evidence}; {', '.join(over[:_SHOWN])}",
        "their launches are refused by the driver",
        "report the card with the output of `metainfer env`: smaller tiles are missing for it",
    )


def ran(patient: Patient) -> Iterator[Finding]:
    """Compiled is not run."""
    known = patient.coverage
    if not known or isinstance(known, Unknown):
        return
    rows = [row for report in known.values() for row in report["rows"] if row["ok"]]
    proved = sum(row["ran_on"] is not None for row in rows)
    target = next(iter(known.values()))["target"]
    if proved == len(rows):
        yield Finding(_RAN, Level.OK, f"all kernels ran on a card of {target}",
                      f"{proved} of {len(rows)} operations and layouts")  # fmt: skip
        return
    yield Finding(
        _RAN,
        Level.UNKNOWN,
        f"for {len(rows) - proved} of {len(rows)} operations and layouts no kernel is known here to"
        f" have run on {target}",
        "records of `metainfer verify` for these very sources",
        "code that compiles and fits may still be wrong or slow",
        "`metainfer verify --model MODEL` on the card, in minutes",
    )


def _sizes(ranks: list[int]) -> str:
    return ", ".join(f"TP{one}" for one in ranks)


CHECKS = (
    Check(_COVERED, "Does every operation have a kernel, at its exact shape?", covered),
    Check(_GATES, "Which better kernels do not take this card, and why?", gates),
    Check(_SHARED, "Do kernels fit into a block's shared memory?", shared),
    Check(_RAN, "Did kernels run on such a card, or were they compiled only?", ran),
)
