"""`metainfer bench model`: this engine against transformers, taking turns on one machine."""

from __future__ import annotations

import json

from metainfer.bench.model_settings import ModelLoad, ModelResults
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.errors import UserError
from metainfer.shipped import SHIPPED_MODEL, model_dir


def run(terminal: Terminal, load: ModelLoad, results: ModelResults) -> int:
    from importlib.util import find_spec

    from metainfer.bench.model import measure
    from metainfer.bench.model_report import record, text_report
    from metainfer.bench.record import check_place, write_json
    from metainfer.hardware.probe import probe

    if find_spec("transformers") is None:
        raise UserError(
            "transformers, the peer, is not installed", hint="pip install 'metainfer[bench]'"
        )
    path = results.result_dir / results.result_filename
    if results.save_result:
        check_place(path, "--result-dir")
    machine = probe()
    directory = model_dir(load.model)
    threads = load.threads or machine.cpu.physical_cores
    with terminal.progress("taken", "turns") as progress:
        sides = measure(load, directory, threads, progress.update, progress.say)
    name = load.model or SHIPPED_MODEL
    made = record(sides, load, name, threads, json.loads(machine.to_json()))
    try:
        if results.save_result:
            write_json(path, made)
            terminal.say(f"wrote {path}")
    finally:
        terminal.data(
            json.dumps(made, indent=2, default=str) if results.json else text_report(made)
        )
    return 0


VERB = Verb(
    "bench model",
    "Measure this engine against transformers",
    (("work", ModelLoad), ("results", ModelResults)),
    run,
    (
        "metainfer bench model",
        "metainfer bench model /data/model --rounds 9 --decode-batches 1,4,16 --save-result",
    ),
)
