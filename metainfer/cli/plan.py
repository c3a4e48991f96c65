"""`metainfer plan`: which layout suits a machine, a model and a workload, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.plan.workload import Workload, parse_workload
from metainfer.shipped import SHIPPED_MODEL

_OBJECTIVES = ("throughput", "ttft", "interactive")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is planned."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory, a config.json or a known name, also of models that are not served"
        " yet; the shipped model if not given",
        aliases=("--model",),
    )
    machine: str | None = flag(
        "--machine",
        "A record of a machine or the name of a recorded one; the machine at hand if not given",
        unit="file|name",
    )
    workload: Workload | None = flag(
        "--workload",
        "What comes, such as input=8192,output=512,concurrency=8 (which is the default), with"
        " rate=2.5 requests a second and context=32K tokens of the longest sequence if need be",
        unit="parts",
        parse=parse_workload,
    )
    objective: str = flag(
        "--objective",
        "What is best: most requests a second, the first token soonest, or each next token soonest",
        "throughput",
        choices=_OBJECTIVES,
    )
    engine: str = flag(
        "--engine",
        "Whose efficiency is assumed: metainfer, b12x, or stock (vLLM and SGLang as they come)",
        "metainfer",
        choices=("metainfer", "b12x", "stock"),
    )
    explain: bool = flag(
        "--explain", "Show where the time goes, the next layouts and why the others lose", False
    )
    json: bool = flag("--json", "Print the record of the plan as JSON", False)
    output: Path | None = flag(
        "--output", "Write the record of the plan to a file", aliases=("-o",), unit="file"
    )


def run(terminal: Terminal, options: PlanOptions) -> int:
    from metainfer.arch.shape_of import read_shape
    from metainfer.hardware.known import machine_of
    from metainfer.plan.ledger_ranks import RankLedgers
    from metainfer.plan.search import search
    from metainfer.plan.search_record import record
    from metainfer.plan.search_text import explained, summary

    result = search(
        read_shape(options.model or SHIPPED_MODEL),
        machine_of(options.machine),
        options.workload or Workload(),
        RankLedgers(),
        options.objective,
        options.engine,
    )
    written = json.dumps(record(result), indent=2)
    if options.output is not None:
        options.output.write_text(written + "\n", encoding="utf-8")
        terminal.say(f"wrote {options.output}")
    if options.json:
        terminal.data(written)
    else:
        terminal.data(explained(result) if options.explain else summary(result))
    return 0


VERB = Verb(
    "plan",
    "Find the layout that suits a machine and a workload",
    (("plan", PlanOptions),),
    run,
    examples=(
        "metainfer plan deepseek-v4-flash --machine rtx-pro-6000-x8",
        "metainfer plan glm-5.3 --machine rtx-6000d-x8 --objective ttft --explain",
        "metainfer plan deepseek-v4-flash --machine l40s-x8 --workload input=32K,output=1 --json",
    ),
)
