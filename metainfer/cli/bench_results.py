"""What verbs that measure do with a record: a table or JSON, and files where asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.terminal import Terminal


def report(
    terminal: Terminal,
    results: BenchResults,
    made: Mapping[str, Any],
    name: str,
    text_report: Callable[[Mapping[str, Any]], str],
    draw: Callable[[Mapping[str, Any]], bytes] | None = None,
) -> None:
    """Write and print the record `made`.

    Args:
        name: of the file where none is given, without an ending.
        draw: makes the picture, if there is one; called only where matplotlib is installed.
    """
    from metainfer.bench.record import write_json, write_whole

    if results.save_result:
        path = results.result_dir / (results.result_filename or f"{name}.json")
        write_json(path, made)
        terminal.say(f"wrote {path}")
        if draw is not None and find_spec("matplotlib") is not None:
            picture = path.with_suffix(".svg")
            write_whole(picture, draw(made))
            terminal.say(f"wrote {picture}")
    terminal.data(json.dumps(made, indent=2, default=str) if results.json else text_report(made))
