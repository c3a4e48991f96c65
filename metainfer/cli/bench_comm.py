"""`metainfer bench comm`: every way for ranks to talk, against bytes, the floor and gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metainfer.bench.comm_settings import CommLoad
from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.errors import UserError

if TYPE_CHECKING:
    from metainfer.hardware.machine import Machine
    from metainfer.plan.comm_record import Way


def run(terminal: Terminal, load: CommLoad, results: BenchResults) -> int:
    from metainfer.bench.comm_report import text_report
    from metainfer.bench.comm_run import run_comm
    from metainfer.comm.group import GroupError
    from metainfer.hardware.probe import probe

    place, machine = place_of(results, "bench-comm"), probe()
    try:
        with terminal.progress("measured", "ways at a size") as progress:
            made, ways = run_comm(load, machine, progress.update)
    except GroupError as error:
        raise UserError(
            f"the ranks could not go on: {error}", hint="try fewer with --ranks"
        ) from error
    report(terminal, results, made, place, text_report, _draw)
    terminal.say(_kept(machine, load.ranks, made, ways))
    return 1 if any(point["wrong"] for point in made["points"]) else 0


def _kept(machine: Machine, ranks: int, made: Mapping[str, Any], ways: Sequence[Way]) -> str:
    """Keep what was measured for plans; says what they do from now on."""
    from metainfer.plan.comm_record import keep

    if not ways:
        why = "samples differ too much" if made["points"] else "no size was reached"
        return f"plans go by what they knew: {why}; try again on a quiet machine"
    try:
        keep(machine, ranks, made["threads"], made["date"], ways)
    except OSError as error:
        return f"plans go by what they knew: {error}"
    return f"from now on {ranks} ranks of a model here take the fastest of these ways"


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
