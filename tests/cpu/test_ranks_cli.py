"""`metainfer serve` and `run` with several ranks: however the processes end, nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from metainfer.arch.split import check_split
from metainfer.arch.tiny import tiny_arch
from tests.fakes.checkpoints import POISON, write_tiny_checkpoint
from tests.fakes.serving import wait_for

LONG_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    check_split(tiny_arch(), 2)
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny"))


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, so that a signal can reach all that it started, as Ctrl-C does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "metainfer", *arguments, "-tp", "2", "--threads", "2"],
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def server(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its URL."""
    with command("serve", model, "--port", "0", "--shutdown-timeout", "0") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready on " in line:
                yield process, line.split()[-1]
                return
        pytest.fail("it ended before it was ready")


def session_of(leader: int) -> set[int]:
    """Processes of a session that have not ended."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8")
        except OSError:
            continue
        state, _, _, session = text.rpartition(")")[2].split()[:4]
        if int(session) == leader and state != "Z":
            found.add(int(name))
    return found


@pytest.mark.parametrize(
    "how", ["ctrl-c", pytest.param("terminate", marks=pytest.mark.soak), "kill"]
)
def test_a_server_of_two_ranks_answers_and_leaves_nobody(model: str, how: str) -> None:
    with server(model) as (process, url):
        ask = {
            "prompt": "x", "max_tokens": 5, "temperature": 0, "ignore_eos": True,
            "logit_bias": {str(POISON): -100},
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=LONG_S).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert len(session_of(process.pid)) >= 2
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(LONG_S) in (130, -signal.SIGINT)
        elif how == "terminate":
            process.terminate()
            assert process.wait(LONG_S) == 0
        else:
            process.kill()
        wait_for(lambda: not session_of(process.pid), LONG_S)


def test_one_that_is_killed_while_its_ranks_load_leaves_nobody(model: str) -> None:
    with command("run", model, "--raw", "--prompt", "x", "--max-tokens", "3") as process:
        wait_for(lambda: len(session_of(process.pid)) >= 3, LONG_S)  # and who tracks resources
        process.kill()
        wait_for(lambda: not session_of(process.pid), LONG_S)
