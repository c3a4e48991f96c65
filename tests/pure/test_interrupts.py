"""Ctrl-C and SIGTERM inside an import, where libraries swallow whatever comes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

GREEDY = """
import signal
swallowed = False
try:
    signal.raise_signal(NUMBER)
except BaseException:
    swallowed = True
"""
COMMAND = """
import time
from metainfer.cli.interrupts import Terminated, handle_signals
handle_signals()
try:
    import greedy
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", greedy.swallowed)
except Terminated:
    print("terminated", greedy.swallowed)
"""


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_inside_an_import_comes_behind_it(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY.replace("NUMBER", str(int(number))))
    ran = run(COMMAND, tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{said} False\n", "")


def test_a_second_signal_inside_an_import_ends_the_process(tmp_path: Path) -> None:
    twice = GREEDY.replace("raise_signal(NUMBER)", "raise_signal(2); signal.raise_signal(2)")
    (tmp_path / "greedy.py").write_text(twice)
    assert run(COMMAND, tmp_path).returncode == -signal.SIGINT


def test_an_import_that_takes_long_does_not_keep_the_process(tmp_path: Path) -> None:
    endless = GREEDY.replace("NUMBER", "15") + "while True:\n    pass\n"
    (tmp_path / "greedy.py").write_text(endless)
    assert run(COMMAND, tmp_path).returncode == 128 + signal.SIGTERM


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
