"""The demo's own parts: a server in a process of its own, and an answer as it streams."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from metainfer.cli import demo
from metainfer.cli.terminal import Terminal
from metainfer.core.errors import UserError

SERVER = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
print("all is well", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DYING = "import sys; print('first'); sys.exit('the last words')"


@pytest.fixture
def terminal() -> Terminal:
    return Terminal(io.StringIO(), io.StringIO(), colour=False, live=False)


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a program stand in for `metainfer serve`."""

    def install(program: str, *more: str) -> None:
        def command(_: Path, port: int) -> list[str]:
            return [sys.executable, "-c", program, str(port), *more]

        monkeypatch.setattr(demo, "serve_command", command)

    return install


def test_a_server_is_awaited_and_stopped(
    serves: Callable[..., None], terminal: Terminal, tmp_path: Path
) -> None:
    serves(SERVER, "0")
    with demo.serving(terminal, tmp_path) as port:
        assert demo._is_ready(port)
    assert not demo._is_ready(port)
    assert "the server has stopped" in terminal.err.getvalue()  # type: ignore[attr-defined]


def test_a_server_that_stops_badly_is_a_failure(
    serves: Callable[..., None], terminal: Terminal, tmp_path: Path
) -> None:
    serves(SERVER, "3")
    with (
        pytest.raises(UserError, match="stopped with code 3") as caught,
        demo.serving(terminal, tmp_path),
    ):
        pass
    assert caught.value.hint == "all is well"


def test_a_server_that_does_not_start_is_quoted(
    serves: Callable[..., None], terminal: Terminal, tmp_path: Path
) -> None:
    serves(DYING)
    with (
        pytest.raises(UserError, match="ended with code 1") as caught,
        demo.serving(terminal, tmp_path),
    ):
        pytest.fail("it never was ready")
    assert caught.value.hint == "first\nthe last words"


def test_a_server_is_ended_whatever_happens(
    serves: Callable[..., None], terminal: Terminal, tmp_path: Path
) -> None:
    serves(SERVER, "0")
    with pytest.raises(KeyboardInterrupt), demo.serving(terminal, tmp_path) as port:
        raise KeyboardInterrupt
    assert not demo._is_ready(port)


@contextmanager
def answering(status: int, lines: list[str]) -> Iterator[tuple[int, list[Any]]]:
    """A server that answers every POST alike; gives its port and the bodies it got."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            bodies.append(json.loads(self.rfile.read(length)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write("\n\n".join([*lines, ""]).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1], bodies
    finally:
        server.shutdown()
        server.server_close()


def chunk(text: str | None, **more: Any) -> str:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, **more})}"


def test_an_answer_is_shown_as_it_comes(terminal: Terminal) -> None:
    usage = {"completion_tokens": 2}
    lines = [": ping", chunk("Once "), chunk("upon"), chunk(None, usage=usage), "data: [DONE]"]
    with answering(200, lines) as (port, bodies):
        demo.ask(terminal, port)
    assert terminal.out.getvalue() == "Once upon\n\n"  # type: ignore[attr-defined]
    assert "2 tokens" in terminal.err.getvalue()  # type: ignore[attr-defined]
    assert bodies[0]["stream"] is True
    assert bodies[0]["messages"][0]["content"] == demo.QUESTION


@pytest.mark.parametrize(
    ("status", "lines", "words"),
    [
        (503, ['{"error": "busy"}'], "answered 503: .*busy"),
        (200, [chunk("a"), 'data: {"error": {"message": "it broke"}}'], "it broke"),
        (200, [chunk("a"), "data: {"], "broke off"),
        (200, ["data: [DONE]"], "the model answered nothing"),
    ],
)
def test_an_answer_that_fails_is_a_sentence(
    status: int, lines: list[str], words: str, terminal: Terminal
) -> None:
    with answering(status, lines) as (port, _), pytest.raises(UserError, match=words):
        demo.ask(terminal, port)


def test_a_server_that_is_not_there(terminal: Terminal) -> None:
    with pytest.raises(UserError, match="broke off: .*refused"):
        demo.ask(terminal, demo.free_port())


def test_a_model_in_a_line() -> None:
    from metainfer.shipped import pebble_dir

    line = demo.describe(pebble_dir())
    assert line.startswith("pebble: deepseek_v4, 657 tensors, ")
    assert "heavily compressed" in line
