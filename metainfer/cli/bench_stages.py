"""`metainfer bench stages`: the same work on the generic path, with fast kernels, fully tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from metainfer.bench.stages_settings import TRANSFORMERS, BenchResults, StagesLoad
from metainfer.cli.bench_results import report
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.errors import UserError
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import SHIPPED_MODEL, model_dir

_MOST_AT_ONCE = 16  # requests of the traffic that an engine is sized for, where no flag says


def run(
    terminal: Terminal, load: StagesLoad, settings: EngineSettings, results: BenchResults
) -> int:
    from importlib.util import find_spec

    from metainfer.arch.families import read_arch
    from metainfer.bench.stage import parse_setting, sized
    from metainfer.bench.stages import Contestant, engine_contestant, measure
    from metainfer.bench.stages_report import record, text_report
    from metainfer.hardware.machine import Unknown
    from metainfer.hardware.probe import probe

    if load.against and find_spec("transformers") is None:
        raise UserError(
            "transformers, the peer, is not installed", hint="pip install 'metainfer[bench]'"
        )
    machine = probe()
    model = str(model_dir(load.model))
    settings = replace(settings, hf_overrides=load.overrides(settings.hf_overrides))
    arch = read_arch(model, settings.hf_overrides)
    sequences = max(*load.decode_batches, min(load.requests, _MOST_AT_ONCE))
    settings = sized(settings, arch, load.longest, sequences)
    threads = settings.threads or machine.cpu.physical_cores
    contestants = [
        engine_contestant(parse_setting(text, settings, arch), model, threads)
        for text in load.settings
    ]
    if load.against == TRANSFORMERS:
        gpu = settings.device != "cpu" and not isinstance(machine.gpus, Unknown) and machine.gpus
        setup = {
            "side": settings.dtype or "bfloat16",
            "model": model,
            "settings": asdict(settings),
            "device": "cuda" if gpu else "cpu",
            "threads": threads,
        }
        contestants.insert(0, Contestant(TRANSFORMERS, setup, threads))
    with terminal.progress("taken", "turns") as progress:
        measured = measure(load, contestants, arch, progress.update, terminal.say)
    name = load.model or SHIPPED_MODEL
    made = record(measured, load, name, arch, json.loads(machine.to_json()))
    report(terminal, results, made, "bench-stages", text_report, _draw)
    return 0


def _draw(made: Mapping[str, Any]) -> bytes:
    from metainfer.bench.plot_stages import draw_stages

    return draw_stages(made)


VERB = Verb(
    "bench stages",
    "Measure generic, adapted and tuned settings in one run",
    (("work", StagesLoad), ("engine", EngineSettings), ("results", BenchResults)),
    run,
    (
        "metainfer bench stages",
        "metainfer bench stages deepseek-v4-flash --load-format dummy --layers 4 --input-lens 8k",
        "metainfer bench stages --settings adapted 'tuned,--threads=1' --against transformers",
    ),
)
