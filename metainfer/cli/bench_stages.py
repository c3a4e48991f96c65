"""`metainfer bench stages`: the same work on the generic path, with fast kernels, fully tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from metainfer.bench.stages_settings import TRANSFORMERS, BenchResults, StagesLoad
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.errors import UserError
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import SHIPPED_MODEL, model_dir

if TYPE_CHECKING:
    from metainfer.arch.record import Arch
    from metainfer.bench.stages import Contestant
    from metainfer.hardware.machine import Machine

_MOST_AT_ONCE = 16  # requests of the traffic that an engine is sized for, where no flag says


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before anything is loaded."""

    machine: Machine
    arch: Arch
    model: str
    engine: EngineSettings
    threads: int
    contestants: list[Contestant]


def prepared(load: StagesLoad, settings: EngineSettings, sides: Mapping[str, str]) -> Prepared:
    """Engines that are sized for the work, by name, from settings as they are written.

    Raises UserError: there is no such model, stage or flag, or the work is longer than the model.
    """
    from metainfer.arch.families import read_arch
    from metainfer.bench.stage import check_room, parse_setting, sized
    from metainfer.bench.stages import check_of, engine_contestant
    from metainfer.hardware.probe import probe

    machine = probe()
    model = str(model_dir(load.model))
    settings = replace(settings, hf_overrides=load.overrides(settings.hf_overrides))
    arch = read_arch(model, settings.hf_overrides)
    sequences = max(*load.decode_batches, min(load.requests, _MOST_AT_ONCE))
    settings = sized(settings, arch, load.longest, sequences)
    threads = settings.threads or machine.cpu.physical_cores
    chosen = {name: parse_setting(text, settings, arch) for name, text in sides.items()}
    for setting in chosen.values():
        check_room(setting, load.longest, max(load.decode_batches))
    contestants = [
        engine_contestant(name, setting, model, threads, check_of(load))
        for name, setting in chosen.items()
    ]
    return Prepared(machine, arch, model, settings, threads, contestants)


def run(
    terminal: Terminal, load: StagesLoad, settings: EngineSettings, results: BenchResults
) -> int:
    from importlib.util import find_spec

    from metainfer.bench.stages import measure, require_turns
    from metainfer.bench.stages_report import record, text_report, wrong_positions

    if load.against and find_spec("transformers") is None:
        raise UserError(
            "transformers, the peer, is not installed", hint="pip install 'metainfer[bench]'"
        )
    if find_spec("flash_mla") is None and any(_is_open(text) for text in load.settings):
        raise UserError(
            "FlashMLA, whose kernels the setting open runs, is not installed",
            hint="pip install sgl-flash-mla, where there is a GPU of sm_90",
        )
    place = place_of(results, "bench-stages")
    ready = prepared(load, settings, {text: text for text in load.settings})
    contestants = list(ready.contestants)
    if load.against == TRANSFORMERS:
        contestants.insert(0, transformers_contestant(ready))
    with terminal.progress("taken", "turns") as progress:
        measured = measure(load, contestants, ready.arch, progress.update, progress.say)
    if load.rounds and not load.check_positions:
        require_turns(measured)
    machine = json.loads(ready.machine.to_json())
    made = record(measured, load, load.model or SHIPPED_MODEL, ready.arch, machine)
    report(terminal, results, made, place, text_report, _draw if load.rounds else None)
    return 1 if wrong_positions(made) or made["not_cold"] else 0


def _is_open(setting: str) -> bool:
    from metainfer.bench.stage import OPEN_STAGE

    return setting.partition(",")[0].strip() == OPEN_STAGE


def transformers_contestant(ready: Prepared) -> Contestant:
    """On the engine's device."""
    from metainfer.bench.stages import Contestant
    from metainfer.hardware.machine import Unknown

    gpus = ready.machine.gpus
    gpu = ready.engine.device != "cpu" and not isinstance(gpus, Unknown) and gpus
    setup = {
        "side": ready.engine.dtype or "bfloat16",
        "model": ready.model,
        "settings": asdict(ready.engine),
        "device": (ready.engine.device or "cuda") if gpu else "cpu",
        "threads": ready.threads,
    }
    return Contestant(TRANSFORMERS, setup, ready.threads)


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
