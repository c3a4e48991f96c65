"""`metainfer bench paired`: the effect of one setting against another, pair by pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from metainfer.bench.paired_settings import A, B, PairedLoad
from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.bench_stages import prepared
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import SHIPPED_MODEL


def run(
    terminal: Terminal, load: PairedLoad, settings: EngineSettings, results: BenchResults
) -> int:
    from metainfer.bench.paired import failures, record, text_report
    from metainfer.bench.stages import measure

    place = place_of(results, "bench-paired")
    ready = prepared(load.stages(), settings, {A: load.a, B: load.b})
    with terminal.progress("taken", "turns") as progress:
        measured = measure(
            load.stages(), ready.contestants, ready.arch, progress.update, progress.say
        )
    machine = json.loads(ready.machine.to_json())
    made = record(measured, load, load.model or SHIPPED_MODEL, ready.arch, machine)
    report(terminal, results, made, place, text_report, _draw)
    return 1 if made["not_cold"] or failures(made) else 0


def _draw(made: Mapping[str, Any]) -> bytes:
    from metainfer.bench.plot_paired import draw_paired

    return draw_paired(made)


VERB = Verb(
    "bench paired",
    "Measure the effect of one setting against another",
    (("work", PairedLoad), ("engine", EngineSettings), ("results", BenchResults)),
    run,
    (
        "metainfer bench paired --a adapted --b tuned --pairs 35",
        "metainfer bench paired /data/model --a tuned,--shared-expert-stream=off --b tuned",
    ),
)
