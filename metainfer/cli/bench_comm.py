"""`metainfer bench comm`: every way for ranks to talk, against bytes, the floor and gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metainfer.bench.comm_settings import CommLoad
from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.errors import UserError


def run(terminal: Terminal, load: CommLoad, results: BenchResults) -> int:
    from metainfer.bench.comm_report import text_report
    from metainfer.bench.comm_run import run_comm
    from metainfer.comm.group import GroupError
    from metainfer.hardware.probe import probe
    from metainfer.plan.comm_record import keep

    place, machine = place_of(results, "bench-comm"), probe()
    try:
        with terminal.progress("measured", "ways at a size") as progress:
            made, ways = run_comm(load, machine, progress.update)
    except GroupError as error:
        raise UserError(
            f"the ranks could not go on: {error}", hint="try fewer with --ranks"
        ) from error
    report(terminal, results, made, place, text_report, _draw)
    try:
        keep(machine, load.ranks, made["threads"], made["date"], ways)
    except OSError as error:
        terminal.say(f"what was measured is not kept for plans: {error}")
    else:
        terminal.say(
            f"from now on {load.ranks} ranks of a model here take the fastest of these ways"
        )
    return 1 if any(point["wrong"] for point in made["points"]) else 0


def _draw(made: Mapping[str, Any]) -> bytes:
    from metainfer.bench.plot_comm import draw_comm

    return draw_comm(made)


VERB = Verb(
    "bench comm",
    "Measure every way for ranks to talk to each other",
    (("work", CommLoad), ("results", BenchResults)),
    run,
    (
        "metainfer bench comm",
        "metainfer bench comm --ranks 4 --operations all_reduce --wires int8 fp8",
        "metainfer bench comm --ranks 4 --max-bytes 67108864 --save-result",
    ),
)
