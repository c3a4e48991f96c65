"""`metainfer bench quality`: whether one setting predicts what another does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.bench.paired_settings import A, B
from metainfer.bench.quality_settings import QualityLoad
from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import SHIPPED_MODEL, model_dir

if TYPE_CHECKING:
    from metainfer.arch.record import Arch


def run(
    terminal: Terminal, load: QualityLoad, settings: EngineSettings, results: BenchResults
) -> int:
    from dataclasses import replace

    from metainfer.arch.families import read_arch
    from metainfer.bench.quality_data import read_data
    from metainfer.bench.quality_run import measure, record, text_report
    from metainfer.bench.stage import check_room, parse_setting, sized
    from metainfer.bench.stages import engine_contestant
    from metainfer.hardware.probe import probe

    place = place_of(results, "bench-quality")
    machine = probe()
    model = Path(model_dir(load.model))
    settings = replace(settings, hf_overrides=load.overrides(settings.hf_overrides))
    arch = read_arch(model, settings.hf_overrides)
    data = read_data(load, model, arch)
    longest = min(data.longest + load.answers, arch.max_model_len)
    settings = sized(settings, arch, longest, sequences=1)
    threads = settings.threads or machine.cpu.physical_cores
    chosen = {
        name: parse_setting(text, settings, arch) for name, text in ((A, load.a), (B, load.b))
    }
    for setting in chosen.values():
        check_room(setting, longest, together=1)
    contestants = [
        engine_contestant(name, setting, str(model), threads) for name, setting in chosen.items()
    ]
    with terminal.progress("predicted", "prompts") as progress:
        said = measure(load, contestants, data, progress.say, progress.update)
    name = load.model or SHIPPED_MODEL
    made = record(said, load, data, name, arch, json.loads(machine.to_json()))
    report(terminal, results, made, place, text_report)
    _keep(terminal, made, model, arch, settings)
    return 0 if made["verdict"]["passed"] else 1


def _keep(
    terminal: Terminal, made: dict[str, Any], model: Path, arch: Arch, settings: EngineSettings
) -> None:
    """A verdict on formats of caches, or of sums over ranks, counts whenever this checkpoint is
    served."""
    from metainfer.plan.proof import judged, keep, model_key, terms_of, wires_of
    from metainfer.plan.wire_proof import WireProof, wire_judged

    key = model_key(model, settings)
    if key is None:
        return
    of_wires = len(set(wires_of(made))) > 1
    proof = wire_judged(made) if of_wires else judged(made, arch)
    if isinstance(proof, str):
        what = "adds up over ranks" if of_wires else "keeps caches"
        terminal.say(f"the plan {what} as before: {proof}")
        return
    try:
        terms = terms_of(made)
    except (LookupError, TypeError, ValueError) as error:
        terminal.say(f"the plan is as before: {error}")
        return
    try:
        keep(made, key)
    except OSError as error:
        terminal.hint(f"the verdict is not kept where serve looks for it: {error}")
        return
    if isinstance(proof, WireProof):
        does = f"adds up rows of prompts in {proof.wire} over {proof.ranks} ranks"
    else:
        does = f"keeps latents in {proof.latents} and index keys in {proof.index_keys}"
    if made["verdict"]["passed"]:
        terminal.say(f"from now on the plan {does} on {terms} where no flag says otherwise")
    else:
        terminal.say(f"on {terms} the plan {does} only where flags say so")


VERB = Verb(
    "bench quality",
    "Judge whether one setting predicts what another does",
    (("what is judged", QualityLoad), ("engine", EngineSettings), ("results", BenchResults)),
    run,
    (
        "metainfer bench quality --a tuned,--dtype=float32 --b tuned",
        "metainfer bench quality /data/model --a tuned,--activations=plain --b tuned --save-result",
        "metainfer bench quality --tp 2 --a tuned,--wire-dtype=plain --b tuned,--wire-dtype=fp8",
    ),
)
