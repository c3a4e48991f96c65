"""Clients that stand still, say half a thing or far too much: all is given back, others served."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from metainfer.server.settings import ServerSettings
from tests.fakes.serving import MODEL, Bench, scripted, wait_for

TEXT = "/v1/completions"
STALL_S = 0.6
CROWD = 64


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    settings = ServerSettings(stall_s=STALL_S)
    with scripted(tmp_path_factory.mktemp("model"), settings, send_bytes=4096) as bench:
        yield bench


@pytest.fixture
def bench(running: Bench, caplog: pytest.LogCaptureFixture) -> Iterator[Bench]:
    """The running server; after each test it has nothing left to do, no complaint, and answers."""
    with caplog.at_level(logging.WARNING):
        yield running
        running.script.says = "Hello there."
        running.engine.flowing.set()
        wait_for(lambda: running.engine.num_live == 0)
        assert len(running.served.service.dispatcher) == 0
        with running.served.http() as http:
            answer = http.post(TEXT, json={"model": MODEL, "prompt": "x"})
            assert answer.json()["choices"][0]["text"] == "Hello there."
    assert not [record for record in caplog.records if record.exc_info]


def connect(bench: Bench, receive_bytes: int | None = None) -> socket.socket:
    """A connection; a small receive buffer makes the server feel that nobody reads."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", int(bench.served.url.rpartition(":")[2])))
    return connection


def head(length: int) -> bytes:
    return f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def is_cut(connection: socket.socket) -> bool:
    """Whether the server ends the connection without an answer."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "beginning",
    [b"", b"POST /v1/comp", b"POST / HTTP/1.1\r\nHost: x\r\n", head(5000), head(5000) + b'{"prom'],
    ids=["nothing", "half a line", "half a head", "no body", "half a body"],
)
def test_half_a_request_from_many_clients(bench: Bench, beginning: bytes) -> None:
    submitted = len(bench.engine.submitted)
    with ExitStack() as stack:
        crowd = [stack.enter_context(connect(bench)) for _ in range(CROWD)]
        for connection in crowd:
            connection.sendall(beginning)
        with bench.served.http() as http:
            assert http.get("/health").status_code == 200, "others are served meanwhile"
        assert all(map(is_cut, crowd))
    assert len(bench.engine.submitted) == submitted


def test_a_head_that_drips_is_cut_too(bench: Bench) -> None:
    """Each byte comes in time, the whole does not."""
    with connect(bench) as connection:
        connection.settimeout(STALL_S / 4)
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        for _ in range(1000):
            try:
                connection.sendall(b"x")
                if connection.recv(10) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it may drip for ever")


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_do_not_read(bench: Bench, stream: bool) -> None:
    """Answers that do not fit the buffers of the system: the server lets go of them."""
    bench.engine.tokens_per_event = 64
    bench.script.answer = lambda _: [300] * 4000
    request = {"model": MODEL, "prompt": "x", "max_tokens": 1000, "logprobs": 5}
    body = json.dumps({**request, "stream": stream}).encode()
    try:
        with ExitStack() as stack:
            before = open_files()
            crowd = [stack.enter_context(connect(bench, 4096)) for _ in range(8)]
            submitted = len(bench.engine.submitted)
            for connection in crowd:
                connection.sendall(head(len(body)) + body)
            wait_for(lambda: len(bench.engine.submitted) == submitted + len(crowd))
            wait_for(lambda: open_files() <= before + len(crowd))  # this side's ends are left
    finally:
        bench.script.answer, bench.engine.tokens_per_event = None, 1


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_heads_without_end(bench: Bench) -> None:
    with connect(bench) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for _ in range(64):
                connection.sendall(b"X-Long: " + b"x" * 4000 + b"\r\n")
            answer = connection.recv(1000)
        except ConnectionError:  # it was cut while this side still wrote
            return
        assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50, b"HELO\r\n\r\n", b"\xff" * 99],
    ids=["TLS", "another protocol", "bytes"],
)
def test_what_is_no_http_gets_an_error_as_all_others(bench: Bench, sent: bytes) -> None:
    with connect(bench) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        answer = b""
        while piece := connection.recv(1000):
            answer += piece
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 400") and b"application/json" in top
    assert json.loads(body)["error"]["code"] == "invalid_http"
