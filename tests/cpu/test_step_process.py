"""Steps in processes of their own: what they say, how they end, that nothing is left of them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from metainfer.cli import step_process
from metainfer.cli.main import EXIT_BUG
from metainfer.cli.step_process import EXIT_LATE, Ended, Job, done_apart, done_here
from metainfer.cli.terminal import Terminal
from tests.fakes import step_verbs

LONG_S = 60.0


def terminal() -> Terminal:
    return Terminal(io.StringIO(), io.StringIO(), colour=False, live=False)


def is_there(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_step_in_this_process(tmp_path: Path) -> None:
    where = terminal()
    file = tmp_path / "record.json"
    job = Job(step_verbs.writes, (file, {"a": 1}, 3), LONG_S)
    assert done_here(job, where) == Ended(3)
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": 1}
    assert isinstance(where.out, io.StringIO) and where.out.getvalue() == ""  # no result
    assert isinstance(where.err, io.StringIO) and where.err.getvalue() == "writing record.json\n"


@pytest.mark.parametrize(
    ("hint", "why"),
    [("take less", "it does not fit (take less)"), ("a\ntraceback", "it does not fit")],
)
def test_errors_are_sentences_with_hints_of_one_line(hint: str, why: str) -> None:
    assert done_here(Job(step_verbs.refuses, (hint,), LONG_S), terminal()) == Ended(2, why)


def test_no_file_and_a_bug() -> None:
    nowhere = Path("/nowhere/record.json")
    assert done_here(Job(step_verbs.writes, (nowhere, {}), LONG_S), terminal()) == Ended(
        2, f"{nowhere}: no such file or directory"
    )
    ended = done_here(Job(step_verbs.raises, (), LONG_S), terminal())
    assert ended.code == EXIT_BUG
    assert ended.why.startswith("Traceback") and "RuntimeError: a bug in" in ended.why


def test_a_step_apart(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    assert done_apart(Job(step_verbs.writes, (file, [1]), LONG_S), terminal()) == Ended(0)
    assert file.read_text(encoding="utf-8") == "[1]"


def test_a_process_that_is_lost() -> None:
    ended = done_apart(Job(step_verbs.dies, (), LONG_S), terminal())
    assert ended == Ended(EXIT_BUG, "its process was ended by SIGKILL")


@pytest.mark.parametrize("verb", [step_verbs.hangs, step_verbs.hangs_for_good])
def test_what_hangs_is_ended_with_all_that_it_began(
    verb: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_process, "_END_S", 0.3)
    told = tmp_path / "ids"
    heard = step_process.wait

    def late(things: list[object], _timeout_s: float) -> list[object]:
        wait_for(told.exists)
        return heard(things, 0.0)

    monkeypatch.setattr(step_process, "wait", late)
    ended = done_apart(Job(verb, (told,), 90.0), terminal())
    assert ended == Ended(EXIT_LATE, "it did not end within 1 min 30 s and was ended")
    ids = json.loads(told.read_text(encoding="utf-8"))
    assert len(ids) == 2
    wait_for(lambda: not any(map(is_there, ids)))


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")]
)
def test_what_ends_this_process_ends_the_step_first(
    number: signal.Signals, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metainfer.cli.interrupts import Terminated, terminate

    told = tmp_path / "ids"

    def interrupt() -> None:
        wait_for(told.exists)
        os.kill(os.getpid(), number)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises((KeyboardInterrupt, Terminated)):
            done_apart(Job(step_verbs.cleans_up, (told,), LONG_S), terminal())
    finally:
        thread.join()
        for one, handler in before.items():
            signal.signal(one, handler)
    assert (tmp_path / "ended").read_text(encoding="utf-8") == how
    assert not is_there(json.loads(told.read_text(encoding="utf-8"))[0])


def test_a_step_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    told = tmp_path / "ids"
    program = (
        "import sys; from pathlib import Path; from tests.fakes import step_verbs;"
        " from metainfer.cli.step_process import Job, done_apart;"
        " from metainfer.cli.terminal import Terminal;"
        f" done_apart(Job(step_verbs.cleans_up, (Path({str(told)!r}),), {LONG_S}),"
        " Terminal(sys.stdout, sys.stderr, colour=False, live=False))"
    )
    waiting = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    try:
        wait_for(told.exists)
    finally:
        waiting.kill()
        waiting.wait()
    (pid,) = json.loads(told.read_text(encoding="utf-8"))
    wait_for(lambda: not is_there(pid))
    assert (tmp_path / "ended").read_text(encoding="utf-8") == "Terminated"
