"""What the doctor found, as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from metainfer.doctor.finding import Check, Finding, Level
from metainfer.doctor.layout_matrix import Row
from metainfer.doctor.matrix import Cell, State

_WIDTH = 100
_LABELS = {Level.FAIL: "FAIL", Level.WARN: "WARN", Level.UNKNOWN: "UNKNOWN", Level.OK: "ok"}
_INDENT = " " * 9


def findings_text(findings: Sequence[Finding]) -> str:
    """The worst first, each with evidence, why it matters and what to do; good ones in a line."""
    lines: list[str] = []
    for level in (Level.FAIL, Level.WARN, Level.UNKNOWN):
        for alike in _alike(one for one in findings if one.level is level):
            lines += [*_whole(alike), ""]
    for one in findings:
        if one.level is Level.OK:
            lines.append(_folded(one))
    return "\n".join([*lines, *([""] if lines else []), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Counts by level."""
    counts = {level: sum(one.level is level for one in findings) for level in Level}
    return (
        f"{counts[Level.FAIL]} failed, {counts[Level.WARN]} warnings, {counts[Level.UNKNOWN]}"
        f" unknown, {counts[Level.OK]} ok"
    )


def checks_text(checks: Iterable[Check]) -> str:
    """Names and questions of all checks."""
    rows = [(check.name, check.question) for check in checks]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {question}" for name, question in rows)


def matrix_text(cells: Sequence[Cell]) -> str:
    width = max(len(cell.feature) for cell in cells)
    lines: list[str] = []
    for cell in cells:
        head = f"{cell.feature.ljust(width)}  {cell.state:<9}  "
        asked = f" [{cell.flag}]" if cell.flag else ""
        lines += _wrapped(f"{cell.why}{asked}", head, " " * len(head))
    return "\n".join(lines)


def layouts_text(rows: Sequence[Row]) -> str:
    """A line a layout: both verdicts, and what to expect or why not; then why of what is not
    expected from memory or rates."""
    width = max(len("layout"), *(len(row.layout) for row in rows))
    lines = [f"{'layout'.ljust(width)}  this engine  vLLM, SGLang  what to expect, or why not"]
    whys: dict[str, list[str]] = {}
    for row in rows:
        (own, own_why), (others, why) = row.own, row.others
        head = f"{row.layout.ljust(width)}  {own:<11}  {others:<12}  "
        text = row.expected or why
        if own_why not in (why, text) and own is not State.WORKS:
            if own is State.PLANNED:
                whys.setdefault(own_why, []).append(row.layout)
            else:
                text += f"; this engine: {own_why}"
        lines += _wrapped(text, head, " " * len(head))
    for reason, names in whys.items():
        lines += ["", *_wrapped(f"this engine, {', '.join(names)}: {reason}", "", "  ")]
    return "\n".join(lines)


def record_of_finding(one: Finding) -> dict[str, Any]:
    """For `--json`."""
    return {
        "check": one.check,
        "level": str(one.level),
        "what": one.what,
        "evidence": one.evidence,
        "matters": one.matters,
        "fix": one.fix,
        "source": one.source,
    }


def record_of_matrix(cells: Iterable[Cell], rows: Iterable[Row]) -> dict[str, Any]:
    """For `--matrix --json`."""
    return {
        "features": [
            {"feature": c.feature, "flag": c.flag, "state": str(c.state), "why": c.why}
            for c in cells
        ],
        "layouts": [
            {
                "layout": row.layout,
                "own": {"state": str(row.own[0]), "why": row.own[1]},
                "others": {"state": str(row.others[0]), "why": row.others[1]},
                "expected": row.expected,
            }
            for row in rows
        ],
    }


def _alike(findings: Iterable[Finding]) -> Iterator[list[Finding]]:
    """Those that matter for the same reason and have the same remedy, such as of eight cards."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.check, one.matters, one.fix), []).append(one)
    yield from groups.values()


def _whole(alike: Sequence[Finding]) -> Iterator[str]:
    first = alike[0]
    yield from _wrapped(
        f"{first.check}: {first.what}", _LABELS[first.level].ljust(len(_INDENT)), _INDENT
    )
    for one in alike[1:]:
        yield from _wrapped(one.what, _INDENT + "and ", _INDENT + "    ")
    evidence = "; ".join(dict.fromkeys(one.evidence for one in alike))
    for label, text in (
        ("evidence", evidence),
        ("matters", first.matters),
        ("fix", first.fix),
        ("source", first.source),
    ):
        if text:
            head = f"{_INDENT}{label:<9}"
            yield from _wrapped(text, head, " " * len(head))


def _folded(one: Finding) -> str:
    text = f"{_LABELS[one.level].ljust(len(_INDENT))}{one.check}: {one.what}"
    if len(text) <= _WIDTH:
        return text
    return text[: _WIDTH - 4].rsplit(" ", 1)[0] + " ..."


def _wrapped(text: str, head: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,  # what is to be copied stays whole
    )
