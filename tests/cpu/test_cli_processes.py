"""The command as a process of its own: signals, pipes and ports, over a miniature checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest

from tests.fakes.checkpoints import POISON, poison, write_tiny_checkpoint

TIMEOUT_S = 120
INTERRUPTED = {130, -signal.SIGINT}
"""Exit code after Ctrl-C; the second where it came while Python compiled a string."""

HEALTHY = {str(POISON): -100}
"""A logit bias under which the model does not say what it could not read."""

LONG: dict[str, Any] = {
    "prompt": "x",
    "max_tokens": 3000,
    "ignore_eos": True,
    "stream": True,
    "logit_bias": HEALTHY,
}


ONE_THREAD = ("--threads", "1")  # others compute at the same time

SEED = "4"
"""With this seed the model talks for long."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("processes") / "tiny"))


@contextmanager
def command(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`metainfer ARGUMENTS` as a process; it is killed if a test leaves it running."""
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(
        [sys.executable, "-m", "metainfer", *arguments],
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **{**streams, **options},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(stream: IO[str] | None, part: str) -> str:
    """What a process says up to the end of the line that holds `part`."""
    assert stream is not None
    said = ""
    for line in stream:
        said += line
        if part in line:
            return said
    pytest.fail(f"it ended before it said {part!r}: {said}")


@contextmanager
def server(model: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server that is ready: process, URL, and what it said so far."""
    with command("serve", model, "--port", "0", *ONE_THREAD, *flags) as process:
        said = read_until(process.stderr, "ready on ")
        yield process, said.split()[-1], said


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and the rest of stderr."""
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in said
    return process.returncode, said


def test_a_server_from_start_to_ctrl_c_in_mid_stream(model: str) -> None:
    with server(model, "--shutdown-timeout", "0") as (process, url, said):
        assert "cpu " in said and "max_model_len" in said and f"serving {model} as tiny" in said
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        ask: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello?"}],
            "max_tokens": 12,
            "seed": 3,
            "logit_bias": HEALTHY,
        }
        whole = client.chat.completions.create(**ask).choices[0].message.content
        chunks = client.chat.completions.create(**ask, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole

        port = url.rpartition(":")[2]
        with command("serve", model, "--port", port) as second:
            code, complaint = end_of(second)
            assert code == 2
            assert f"port {port} on 127.0.0.1 is in use" in complaint and "hint:" in complaint

        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["message"] == "the server is shutting down"
        assert rest[-1] == "data: [DONE]"
        assert end_of(process)[0] in INTERRUPTED
        assert process.stdout is not None
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(port)), 5)


def test_not_a_number_stays_with_its_request_and_sigterm_drains(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "tiny")
    poison(directory)
    with server(str(directory)) as (process, url, _), httpx.Client(timeout=60) as http:

        def complete(prompt: list[int]) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            return http.post(f"{url}/v1/completions", json={**body, "logit_bias": HEALTHY})

        prompts = [[40 + i, 50, 60] for i in range(4)]
        alone = [complete(prompt).json()["choices"] for prompt in prompts]
        with ThreadPoolExecutor(8) as pool:
            bad = [pool.submit(complete, [40, POISON, 50]) for _ in range(3)]
            together = [answer.json()["choices"] for answer in pool.map(complete, prompts)]
        assert together == alone
        for answer in (job.result() for job in bad):
            assert answer.status_code == 500
            assert "not finite numbers" in answer.json()["error"]["message"]
        assert http.get(f"{url}/health").status_code == 200

        body = {**LONG, "max_tokens": 40}
        with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert end_of(process)[0] == 0


def test_ctrl_c_while_the_model_loads(model: str) -> None:
    with command("serve", model, "--port", "0", *ONE_THREAD) as process:
        read_until(process.stderr, "memory in all")
        process.send_signal(signal.SIGINT)
        code, said = end_of(process)
        assert code in INTERRUPTED and "terminate" not in said


def test_a_reader_that_goes_away_and_ctrl_c_in_an_answer(model: str) -> None:
    flags = (*ONE_THREAD, "--prompt", "x", "--max-tokens", "3000", "--seed", SEED)
    with command("run", model, *flags) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 141
    with command("run", model, *flags) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert end_of(process)[0] in INTERRUPTED


def test_a_writer_that_is_ended_or_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def begun(process: subprocess.Popen[str]) -> None:
        while not list(tmp_path.glob(".model.partial-*/*.safetensors")):
            assert process.poll() is None
            time.sleep(0.01)

    write = ("weights", "synth", str(target), "--max-shard-bytes", "100000")
    with command(*write) as process:
        begun(process)
        process.send_signal(signal.SIGTERM)
        assert end_of(process)[0] == 143
        assert list(tmp_path.iterdir()) == []
    with command(*write) as process:
        begun(process)
        process.kill()
        process.wait(TIMEOUT_S)
        assert list(tmp_path.iterdir()) != [] and not target.exists()
    with command(*write) as process:
        assert end_of(process)[0] == 0
        assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_below_stdout() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as stdout, command("version", stdout=stdout) as process:
        code, said = end_of(process)
        assert code == 2 and "no space left on device" in said
