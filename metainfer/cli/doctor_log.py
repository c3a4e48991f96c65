"""What `metainfer doctor --log FILE` prints: a server's log in plain words."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.cli.terminal import Terminal
from metainfer.core.errors import UserError

if TYPE_CHECKING:
    from metainfer.doctor.logs.scan import LogReport, Sighting

_WIDTH = 100
_INDENT = " " * 9
_WORDS = {"fail": "FAIL", "warn": "WARN", "unknown": "MEASURE", "ok": "note"}
_COUNTED = {"fail": "failed", "warn": "warnings", "unknown": "to be measured", "ok": "notes"}


def read_log(terminal: Terminal, log: str, *, as_json: bool) -> int:
    """Read a log ("-": stdin) and print what it says; 0, 1 with warnings, 2 with failures."""
    from metainfer.doctor.finding import exit_code
    from metainfer.doctor.logs.pattern import load_known
    from metainfer.doctor.logs.scan import scan

    known = load_known()
    if log == "-":
        if sys.stdin is None:  # it was closed when the process began
            raise UserError("--log - reads stdin, which is closed", hint="name a file")
        report = scan(sys.stdin.buffer, known)
    else:
        path = Path(log)
        try:
            with path.open("rb") as stream, terminal.progress(f"reading {path.name}") as progress:
                size = path.stat().st_size
                report = scan(stream, known, lambda done: progress.update(done, max(done, size)))
        except OSError as error:
            raise UserError(f"--log: {log} cannot be read: {error.strerror}") from error
    name = "the log on stdin" if log == "-" else log
    if as_json:
        terminal.data(json.dumps(record(name, report, len(known.patterns)), indent=2))
    else:
        terminal.data("\n".join(_lines(name, report, len(known.patterns))))
    return exit_code(report.findings)


def record(name: str, report: LogReport, num_patterns: int) -> dict[str, Any]:
    """The report as docs/doctor-logs.md describes it."""
    from metainfer.doctor.finding import exit_code

    return {
        "log": name,
        "lines": report.reading.num_lines,
        "clipped_lines": report.reading.num_clipped,
        "broken": report.reading.broken,
        "engines": dict(report.versions),
        "patterns": num_patterns,
        "findings": [_finding_record(sighting) for sighting in report.sightings],
        "exit_code": exit_code(report.findings),
    }


def _finding_record(sighting: Sighting) -> dict[str, Any]:
    finding, pattern = sighting.finding(), sighting.pattern
    return {
        "id": pattern.id,
        "engine": pattern.engine,
        "level": str(pattern.level),
        "what": finding.what,
        "first_line": sighting.first_line,
        "count": sighting.count,
        "line": sighting.line,
        "text": sighting.text,
        "fields": dict(sighting.all_fields),
        "matters": finding.matters,
        "fix": finding.fix,
        "source": finding.source,
    }


def _lines(name: str, report: LogReport, num_patterns: int) -> Iterator[str]:
    reading = report.reading
    engines = ", ".join(f"{name} {version}".strip() for name, version in report.versions.items())
    yield from _wrapped(
        f"{name}: {reading.num_lines:,} lines" + (f" of {engines}" if engines else ""), ""
    )
    if reading.broken:
        yield from _wrapped(f"only its beginning could be read: {reading.broken}", "")
    if not report.sightings:
        yield ""
        yield f"nothing known found: none of the {num_patterns} kinds of lines that are known here"
        return
    for sighting in report.sightings:
        yield ""
        yield from _sighting_lines(sighting)
    yield ""
    levels = [str(sighting.pattern.level) for sighting in report.sightings]
    yield ", ".join(f"{levels.count(level)} {word}" for level, word in _COUNTED.items())


def _sighting_lines(sighting: Sighting) -> Iterator[str]:
    finding = sighting.finding()
    word = _WORDS[str(finding.level)]
    yield from _wrapped(f"{sighting.pattern.id}: {finding.what}", word.ljust(len(_INDENT)))
    for label, text in (
        ("where", finding.evidence),
        ("matters", finding.matters),
        ("fix", finding.fix),
        ("source", finding.source),
    ):
        if text:
            yield from _wrapped(text, f"{_INDENT}{label:<9}")


def _wrapped(text: str, head: str) -> list[str]:
    """Lines of at most 100 columns, the further ones as deep as the head."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )  # fmt: skip
