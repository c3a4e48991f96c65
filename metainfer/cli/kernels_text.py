"""Reports about kernels as text: cases in few words, coverage as paragraphs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metainfer.kernels.tuned import DEFAULT
from metainfer.ops.kernel_order import NO_KERNEL

WIDTH = 98
_SAME_IN_A_MODEL = frozenset(
    {"eps", "norm_eps", "iterations", "limit", "dtype", "stream_dtype", "interleaved"}
)


def told_case(case: Mapping[str, Any]) -> str:
    """The facts of a case that tell it from others of a model."""
    told = []
    for name, value in case.items():
        if name in _SAME_IN_A_MODEL or value in (None, "", 0, "dense"):
            continue
        if value is True or isinstance(value, str):
            told.append(name if value is True else value)
        elif isinstance(value, float):
            told.append(f"{name} {value:.3g}")
        else:
            told.append(f"{name} {value}")
    return ", ".join(told)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most WIDTH characters; those behind the first are indented further."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def coverage_text(report: Mapping[str, Any]) -> str:
    """A paragraph for each operation and case, then what is not covered, then the sum."""
    lines = []
    for rows in _groups(report["rows"], "op", "case"):
        first = rows[0]
        times = f" ({first['times']} times a pass)" if first["times"] > 1 else ""
        lines += wrapped(f"{first['op']}: {told_case(first['case'])}{times}")
        for alike in _groups(rows, "runs_on", "why", "launches", "code", "torch_calls", "problems"):
            lines += _facts(", ".join(row["phase"] for row in alike), alike[0])
    bad = [row for row in report["rows"] if not row["ok"]]
    if bad:
        lines += ["", "not covered:"]
    for row in bad:
        name = f"{row['op']}: {told_case(row['case'])}, {row['phase']}"
        lines += wrapped(f"{name}: {'; '.join(row['problems'])}", "  ")
    return "\n".join([*lines, "", *wrapped(_summary(report))])


def _groups(rows: Sequence[Mapping[str, Any]], *keys: str) -> Iterator[list[Mapping[str, Any]]]:
    """Rows that agree in `keys`, in order of the first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row[key] for key in keys]), []).append(row)
    yield from groups.values()


def _facts(phases: str, row: Mapping[str, Any]) -> list[str]:
    facts = [f"{phases}: {row['runs_on'] or 'NOTHING'}"]
    if row["why"] not in ("", DEFAULT):
        facts.append(row["why"])
    if row["launches"]:
        facts += [
            "1 launch" if row["launches"] == 1 else f"{row['launches']} launches",
            " + ".join(row["matrix"]) or "no products",
            f"{row['shared_bytes']:,} B shared",
            f"{row['registers']} registers",
        ]
        if row["stack_bytes"]:
            facts.append(f"{row['stack_bytes']} B of stack")
        facts.append(f"ran on {row['ran_on']}" if row["ran_on"] else "compiled only")
    if not row["ok"]:
        facts.append("NOT COVERED")
    lines = wrapped(", ".join(facts), "  ")
    if row["torch_calls"]:
        lines += wrapped("and in torch: " + ", ".join(row["torch_calls"]), "    ")
    for refused in row["refused"]:
        if row["ok"] and refused["reason"] == NO_KERNEL:
            continue  # nothing was ever meant to be there
        lines += wrapped(f"not {refused['backend']}: {refused['reason']}", "    ")
    return lines


def _summary(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    code = {json.dumps(piece): piece for row in rows for piece in row["code"]}
    spilling = sum(bool(piece.get("stack_bytes")) for piece in code.values())
    ranks = report["tensor_parallel_size"]
    shared = "".join(
        f" {report[name]} of which {share},"
        for name, share in (
            ("prefill_context_parallel_size", "share tokens of prefills"),
            ("decode_context_parallel_size", "divide caches"),
        )
        if report[name] > 1
    )
    card = f"{report['card']}; {report['shared_limit_bytes'] // 1024} KiB of shared memory a block"
    ran = sum(row["ran_on"] is not None for row in rows)
    return (
        f"{report['model']}"
        + (f", one of {ranks} ranks,{shared}" if ranks > 1 else "")
        + f" on {report['target']} ({card}):"
        f" {report['covered']} of {len(rows)} covered, {ran} ran;"
        f" {len(code)} pieces of code, {spilling} use the stack"
    )
