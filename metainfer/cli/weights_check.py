"""`metainfer weights check`: what a checkpoint directory holds, and all that is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.units import format_bytes, format_count
from metainfer.shipped import model_dir

if TYPE_CHECKING:
    from metainfer.weights.check import CheckReport


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is checked."""

    model: str | None = flag(
        "MODEL", "A checkpoint directory; the shipped model if not given", aliases=("--model",)
    )
    deep: bool = flag("--deep", "Read all data too, for NaN, infinities and wrong ids", False)
    json: bool = flag("--json", "Print the report as JSON", False)


def run(terminal: Terminal, options: CheckOptions) -> int:
    from metainfer.bench.record import table
    from metainfer.weights.check import check_checkpoint

    directory = str(model_dir(options.model))
    with terminal.progress("read") as progress:
        report = check_checkpoint(directory, options.deep, progress.update)
    if options.json:
        terminal.data(json.dumps(report.to_json(), indent=2))
        return 0 if report.ok else 1
    rows = [
        [g.group, format_count(g.num_tensors), format_bytes(g.num_bytes), ", ".join(g.formats)]
        for g in report.groups
    ]
    if rows:
        terminal.data(table(["part", "tensors", "size", "formats"], rows))
    terminal.data(_verdict(report))
    return 0 if report.ok else 1


def _verdict(report: CheckReport) -> str:
    from metainfer.bench.record import prose

    total = (
        f"{format_count(report.num_tensors)} tensors, {format_bytes(report.num_bytes)},"
        f" {report.num_files} file(s)"
    )
    if report.ok:
        depth = "read and sound" if report.deep else "complete, of the right shapes and formats"
        return "\n" + prose(f"{report.directory}: {total}: {depth}")
    lines = ["", prose(f"{report.directory}: {total}: {len(report.problems)} problem(s)")]
    lines += [prose(f"{problem.kind}: {problem.text}", "  ") for problem in report.problems]
    return "\n".join(lines)


VERB = Verb(
    "weights check",
    "Check a checkpoint without loading it",
    (("what is checked", CheckOptions),),
    run,
    ("metainfer weights check", "metainfer weights check /data/deepseek-v4-flash --deep"),
)
