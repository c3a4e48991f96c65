"""Verbs of steps that do nothing, fail, hang or die, in the processes that steps run in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from metainfer.cli.terminal import Terminal
from metainfer.core.errors import UserError


def writes(terminal: Terminal, file: Path, record: Any, code: int = 0) -> int:
    """A line to stderr, a result to stdout, a record, an exit code."""
    terminal.say(f"writing {file.name}")
    terminal.data("the result")
    file.write_text(json.dumps(record), encoding="utf-8")
    return code


def refuses(terminal: Terminal, hint: str) -> int:
    raise UserError("it does not fit", hint=hint)


def raises(terminal: Terminal) -> int:
    raise RuntimeError(f"a bug in {Path.home()}/somewhere")


def dies(terminal: Terminal) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hangs(terminal: Terminal, told: Path) -> int:
    """Starts a process that outlives what it is told, writes both ids, and waits."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _tell(told, [os.getpid(), child.pid])
    time.sleep(600)
    return 0


def hangs_for_good(terminal: Terminal, told: Path) -> int:
    """The same in code that no signal ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return hangs(terminal, told)


def cleans_up(terminal: Terminal, told: Path) -> int:
    """Waits, and says how it was ended."""
    _tell(told, [os.getpid()])
    try:
        threading.Event().wait(600)
    except BaseException as error:
        told.with_name("ended").write_text(type(error).__name__, encoding="utf-8")
        raise
    return 0


def _tell(told: Path, ids: list[int]) -> None:
    unfinished = told.with_suffix(".part")
    unfinished.write_text(json.dumps(ids), encoding="utf-8")
    unfinished.replace(told)
