"""`metainfer bench serve`: load on a server, as a table or a JSON record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from metainfer.bench.serve_settings import ServeLoad, ServeResults
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb


def run(terminal: Terminal, load: ServeLoad, results: ServeResults) -> int:
    from metainfer.bench.record import check_place, write_json
    from metainfer.bench.serve import measure
    from metainfer.bench.serve_report import record, text_report
    from metainfer.hardware.probe import probe

    if results.save_result:
        check_place(results.result_dir / (results.result_filename or "record"), "--result-dir")
    terminal.say(f"load on {load.base_url}: {load.num_prompts} requests, {load.repeats} run(s)")
    with terminal.progress("ended", "requests") as progress:
        measured = measure(load, progress.update)
    made = record(measured, load, results, json.loads(probe().to_json()))
    try:
        if results.save_result:
            path = results.result_dir / (results.result_filename or file_name(made))
            write_json(path, made)
            terminal.say(f"wrote {path}")
    finally:
        terminal.data(json.dumps(made, indent=2) if results.json else text_report(made, results))
    if measured.interrupted:
        raise KeyboardInterrupt
    return 1 if made["failed"] else 0


def file_name(made: dict[str, Any]) -> str:
    """Made of what distinguishes one result from another."""
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(made["model_id"]).name)
    date = re.sub(r"[^0-9T]", "", made["date"].partition("+")[0])
    return f"{made['backend']}-{made['request_rate']}qps-{model}-{date}.json"


VERB = Verb(
    "bench serve",
    "Put load on a server and measure it",
    (("load", ServeLoad), ("results", ServeResults)),
    run,
    (
        "metainfer bench serve --num-prompts 64 --max-concurrency 8",
        "metainfer bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:500 tpot:50",
        "metainfer bench serve --dataset-name text --dataset-path book.txt --json",
    ),
)
