"""`metainfer profile`: where the time of a prefill and of a decode step goes, by operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from metainfer.bench.profile_settings import ProfileLoad
from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import SHIPPED_MODEL, model_dir


def run(
    terminal: Terminal, load: ProfileLoad, settings: EngineSettings, results: BenchResults
) -> int:
    from metainfer.arch.families import read_arch
    from metainfer.bench.profile import Meter, profiles
    from metainfer.bench.profile_report import record, text_report
    from metainfer.bench.stage import check_room, parse_setting, sized
    from metainfer.bench.watched import Watched
    from metainfer.kernels.verify import rates_as
    from metainfer.llm.engine import load_model

    place = place_of(results, "profile")
    model = model_dir(load.model)
    settings = replace(settings, hf_overrides=load.overrides(settings.hf_overrides))
    arch = read_arch(model, settings.hf_overrides)
    longest = max(load.prefill_tokens, load.decode_context) + 1
    settings = sized(settings, arch, longest, max(load.decode_batches))
    chosen = parse_setting(load.setting, settings, arch)
    check_room(chosen, longest, max(load.decode_batches))
    # Each kernel shall have a time of its own.
    alone = replace(
        chosen.engine, enforce_eager=True, cuda_graph_sizes=(), shared_expert_stream="off"
    )
    meter = Meter("cpu")
    with terminal.progress("loading") as progress:
        loaded = load_model(
            model, alone, progress.update, watched=lambda registry: Watched(registry, meter)
        )
    meter.device = loaded.plan.device.value.partition(":")[0]
    found = profiles(loaded, meter, load, terminal.say)
    rates = rates_as(meter.device, alone.code_for)
    made = record(found, loaded, load, load.model or SHIPPED_MODEL, rates)
    report(terminal, results, made, place, text_report, _draw)
    return 0


def _draw(made: Mapping[str, Any]) -> bytes:
    from metainfer.bench.plot_profile import draw_profile

    return draw_profile(made)


VERB = Verb(
    "profile",
    "Say where the time of a step goes, by operation",
    (("steps", ProfileLoad), ("engine", EngineSettings), ("results", BenchResults)),
    run,
    (
        "metainfer profile",
        "metainfer profile deepseek-v4-flash --load-format dummy --layers 4 --input-len 8k",
        "metainfer profile --setting generic --save-result",
    ),
)
