"""`make demo`: serve a model in a process of its own, ask it over HTTP, then measure it against
transformers on the same checkpoint.

Everything is what a user would do: `metainfer serve`, one streamed chat completion, and
`metainfer bench model` with few rounds. The parent process imports no torch.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metainfer.arch.families import read_arch
from metainfer.arch.manifest import manifest, total_bytes
from metainfer.bench.model import measure
from metainfer.bench.model_report import record, text_report
from metainfer.bench.model_settings import ModelLoad
from metainfer.cli.env import machine_rows
from metainfer.cli.main import finish
from metainfer.cli.terminal import Terminal
from metainfer.core.env import bound_spinning, read_environment
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes, format_seconds
from metainfer.hardware.machine import Machine
from metainfer.hardware.probe import probe
from metainfer.shipped import pebble_dir

QUESTION = "How do I bake bread?"
_MOST_TOKENS = 160
_START_S = 180.0  # a server that is not ready by then never will be
_STOP_S = 30.0
_POLL_S = 0.1
_LOOPBACK = "127.0.0.1"
_LOG_LINES = 5


def run(terminal: Terminal, directory: Path, load: ModelLoad) -> int:
    """The whole demo. Raises UserError saying which part failed."""
    machine = probe()
    terminal.heading("This machine")
    for label, fact in machine_rows(machine):
        terminal.say(f"  {label:<10}{fact}")
    terminal.heading("\nThe model")
    terminal.say(f"  {describe(directory)}")

    terminal.heading("\nmetainfer serve, and a question over HTTP")
    with serving(terminal, directory) as port:
        terminal.say(f"  > {QUESTION}\n")
        ask(terminal, port)

    terminal.heading("\nmetainfer bench model: the same checkpoint in transformers")
    terminal.data(compare(terminal, directory, load, machine))
    return 0


def describe(directory: Path) -> str:
    """A model in a line."""
    arch = read_arch(directory)
    kinds = ", ".join(str(layer.kind).replace("_", " ") for layer in arch.layers)
    return (
        f"{arch.name}: {arch.family}, {len(manifest(arch))} tensors,"
        f" {format_bytes(total_bytes(arch))}; layers: {kinds}; {arch.num_experts} experts,"
        f" {arch.experts_per_token} per token"
    )


@contextmanager
def serving(terminal: Terminal, directory: Path) -> Iterator[int]:
    """`metainfer serve` in a process of its own until the block ends; gives the port.

    Raises UserError with its last words if it does not start, or does not stop in good order.
    """
    port = free_port()
    command = serve_command(directory, port)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # Ctrl-C reaches the parent alone, which then stops the server.
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            started_s = time.monotonic()
            _await_ready(terminal, server, port, log)
            seconds = format_seconds(time.monotonic() - started_s)
            terminal.say(f"  listening on http://{_LOOPBACK}:{port} after {seconds}")
            yield port
            server.send_signal(signal.SIGTERM)
            if server.wait(_STOP_S) != 0:
                raise _failure(f"the server stopped with code {server.returncode}", log)
            terminal.say("  the server has stopped")
        except subprocess.TimeoutExpired:
            raise _failure(f"the server did not stop within {_STOP_S:g} s", log) from None
        finally:
            server.kill()
            server.wait()


def serve_command(directory: Path, port: int) -> list[str]:
    words = [sys.executable, "-m", "metainfer", "serve", str(directory)]
    return [*words, "--host", _LOOPBACK, "--port", str(port)]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def ask(terminal: Terminal, port: int) -> None:
    """Ask the question and write the answer to stdout as it comes."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": _MOST_TOKENS,
        "seed": 1,
        "chat_template_kwargs": {"thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.monotonic()
    first_s: float | None = None
    usage: dict[str, int] = {}
    for chunk in stream(port, "/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if text:
            first_s = first_s or time.monotonic()
            terminal.data(text, end="")
    terminal.data("\n")
    if first_s is None:
        raise UserError("the model answered nothing", hint="is this a model that can chat?")
    tokens = usage["completion_tokens"]
    rate = tokens / (time.monotonic() - started_s)
    first = format_seconds(first_s - started_s)
    terminal.say(f"  first token after {first}, {tokens} tokens, {rate:.0f} tokens/s in all")


def stream(port: int, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Raises UserError."""
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=_START_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            said = response.read().decode("utf-8", errors="replace")
            raise UserError(f"{path} answered {response.status}: {said}")
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise UserError(f"the server ended the answer: {event['error']['message']}")
            yield event
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"{path} broke off: {error}") from error
    finally:
        connection.close()


def compare(terminal: Terminal, directory: Path, load: ModelLoad, machine: Machine) -> str:
    """The table of this engine against transformers."""
    threads = machine.cpu.physical_cores
    with terminal.progress("taken", "turns") as progress:
        sides = measure(load, directory, threads, progress.update, progress.say)
    made = record(sides, load, directory.name, threads, json.loads(machine.to_json()))
    return f"\n{text_report(made)}"


def main(arguments: Sequence[str], terminal: Terminal) -> int:
    parser = argparse.ArgumentParser(prog="python -m metainfer.cli.demo")
    parser.add_argument("model", nargs="?", type=Path, help="the shipped model if not given")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    options = parser.parse_args(arguments)
    load = ModelLoad(rounds=options.rounds, agreement_prompts=2)
    return run(terminal, options.model or pebble_dir(), load)


def _await_ready(terminal: Terminal, server: subprocess.Popen[bytes], port: int, log: Any) -> None:
    terminal.say("  starting the server")
    deadline_s = time.monotonic() + _START_S
    while not _is_ready(port):
        if server.poll() is not None:
            raise _failure(f"the server ended with code {server.returncode}", log)
        if time.monotonic() > deadline_s:
            raise _failure(f"the server was not ready after {_START_S:g} s", log)
        time.sleep(_POLL_S)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=_START_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def _failure(message: str, log: Any) -> UserError:
    log.seek(0)
    said = log.read().strip().splitlines()[-_LOG_LINES:]
    return UserError(message, hint="\n".join(said) or None)


if __name__ == "__main__":
    bound_spinning()
    standard = Terminal.standard(read_environment())
    finish(lambda: main(sys.argv[1:], standard), standard)
