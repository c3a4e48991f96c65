"""What verbs that measure do with a record: a table or JSON, and files where asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.terminal import Terminal


def place_of(results: BenchResults, name: str) -> Path | None:
    """The file that the record will go to, None where none is asked for. To be called before
    anything is measured.

    Args:
        name: of the file where none is given, without an ending.

    Raises UserError: it cannot be written.
    """
    from metainfer.bench.record import check_place

    if not results.save_result:
        return None
    path = results.result_dir / (results.result_filename or f"{name}.json")
    check_place(path, "--result-dir")
    return path


def report(
    terminal: Terminal,
    results: BenchResults,
    made: Mapping[str, Any],
    path: Path | None,
    text_report: Callable[[Mapping[str, Any]], str],
    draw: Callable[[Mapping[str, Any]], bytes] | None = None,
) -> None:
    """Write the record `made` to `path`, if there is one, and print it even where that fails.

    Args:
        draw: makes the picture, if there is one; called only where matplotlib is installed.
    """
    from metainfer.bench.record import write_json, write_whole

    try:
        if path is not None:
            write_json(path, made)
            terminal.say(f"wrote {path}")
            if draw is not None and find_spec("matplotlib") is not None:
                picture = path.with_suffix(".svg")
                write_whole(picture, draw(made))
                terminal.say(f"wrote {picture}")
    finally:
        terminal.data(
            json.dumps(made, indent=2, default=str) if results.json else text_report(made)
        )
