"""`metainfer bench ops`: every operation at real shapes against its floor, torch, open kernels."""

from __future__ import annotations

import json

from metainfer.bench.ops_settings import OpsLoad, OpsResults
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb


def run(terminal: Terminal, load: OpsLoad, results: OpsResults) -> int:
    from metainfer.bench.ops_report import text_report
    from metainfer.bench.ops_run import run_ops
    from metainfer.bench.record import check_place, write_json

    path = results.result_dir / results.result_filename
    if results.save_result:
        check_place(path, "--result-dir")
    with terminal.progress("measured", "operations") as progress:
        made = run_ops(load, progress.update, progress.say)
    try:
        if results.save_result:
            write_json(path, made)
            terminal.say(f"wrote {path}")
    finally:
        terminal.data(json.dumps(made, indent=2) if results.json else text_report(made))
    return 0


VERB = Verb(
    "bench ops",
    "Measure each operation against its floor",
    (("work", OpsLoad), ("results", OpsResults)),
    run,
    (
        "metainfer bench ops",
        "metainfer bench ops deepseek-v4-flash glm-5.3 --tensor-parallel-size 1 4 8 --as sm_89",
        "metainfer bench ops deepseek-v4-flash --ops 'attention.*' --context 128k --save-result",
    ),
)
