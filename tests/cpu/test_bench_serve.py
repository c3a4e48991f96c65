"""`bench serve` against a scripted server: what it sends and counts, how it times, how it fails."""

from __future__ import annotations

import asyncio
import threading
from itertools import islice
from typing import Any

import pytest

from metainfer.bench.http_stream import ExchangeError, Server, get_json, stream_completion
from metainfer.bench.serve import _unless, measure
from metainfer.bench.serve_report import summary
from metainfer.bench.serve_settings import ServeLoad, ServeResults
from metainfer.bench.workload import arrival_times_s
from metainfer.core.errors import UserError
from tests.fakes.scripted_server import ScriptedServer, running


def load(server: ScriptedServer, **changes: Any) -> ServeLoad:
    settings: dict[str, Any] = {
        "base_url": server.url,
        "num_prompts": 8,
        "random_input_len": 200,
        "random_output_len": 6,
        "seed": 1,
    }
    return ServeLoad(**(settings | changes))


def ignore(_: int, __: int) -> None:
    pass


def test_lengths_are_met_and_tokens_counted_from_usage() -> None:
    with running(ScriptedServer()) as server:
        seen: list[tuple[int, int]] = []
        measured = measure(load(server), lambda done, total: seen.append((done, total)))
    figures = summary(measured.runs[0], ServeResults())
    assert measured.model == "scripted"
    assert (figures["completed"], figures["failed"]) == (8, 0)
    # 65 words of 3 tokens and 5 of the template: exactly what was asked for.
    assert figures["total_input_tokens"] == 8 * 200
    assert figures["total_output_tokens"] == 8 * 6
    assert figures["total_cached_tokens"] == 0
    assert seen[-1] == (8, 8)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        low, high = figures[f"median_{metric}_ms"], figures[f"p99_{metric}_ms"]
        assert 0 < low <= high
    assert figures["mean_e2el_ms"] > figures["mean_ttft_ms"] > 0


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_what_is_sent(backend: str) -> None:
    with running(ScriptedServer()) as server:
        measure(
            load(server, backend=backend, ignore_eos=True, api_key="key", num_prompts=2), ignore
        )
    body = server.bodies[-1]
    assert ("messages" in body) == (backend == "openai-chat")
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0.0
    assert all("Authorization: Bearer key" in head for head in server.headers)


def test_no_prompt_is_sent_twice_not_even_its_first_word() -> None:
    with running(ScriptedServer()) as server:
        measure(load(server, num_prompts=20, repeats=2), ignore)
    first_words = [body["prompt"].split()[0] for body in server.bodies]
    assert len(first_words) == 2 + 1 + 40  # calibration, warm-up, two runs
    assert len(set(first_words)) == len(first_words)


def test_the_seed_fixes_the_load() -> None:
    prompts = []
    for _ in range(2):
        with running(ScriptedServer()) as server:
            measure(load(server, random_range_ratio=0.5, max_concurrency=1), ignore)
        prompts.append([(body["prompt"], body["max_tokens"]) for body in server.bodies])
    assert prompts[0] == prompts[1]
    assert len({max_tokens for _, max_tokens in prompts[0][3:]}) > 1


def test_closed_loop_keeps_to_its_concurrency() -> None:
    with running(ScriptedServer()) as server:
        measure(load(server, num_prompts=12, max_concurrency=3), ignore)
    assert server.most_in_flight == 3


def test_open_loop_waits_for_arrivals() -> None:
    with running(ScriptedServer()) as server:
        run = measure(load(server, num_prompts=6, request_rate=50.0, num_warmups=0), ignore).runs[0]
    wanted_s = list(islice(arrival_times_s(1, 50.0, 1.0), 6))
    sent_s = sorted(outcome.started_s for outcome in run.outcomes)
    for sent, wanted in zip(sent_s, wanted_s, strict=True):
        assert sent - sent_s[0] >= wanted - 0.02
    assert run.duration_s >= wanted_s[-1]


def test_failures_are_counted_and_named_and_spoil_nothing() -> None:
    with running(ScriptedServer(failing=frozenset({4}), cut=frozenset({6}))) as server:
        measured = measure(load(server, max_concurrency=1), ignore)
    figures = summary(measured.runs[0], ServeResults())
    assert (figures["completed"], figures["failed"]) == (6, 2)
    assert figures["total_output_tokens"] == 6 * 6
    assert figures["errors"] == [
        "HTTP 503: the queue is full",
        "the server ended the connection in mid-answer",
    ]


def test_a_server_without_usage_cannot_be_measured() -> None:
    with (
        running(ScriptedServer(with_usage=False)) as server,
        pytest.raises(UserError, match="did not report usage"),
    ):
        measure(load(server), ignore)


def test_a_request_that_takes_too_long_has_failed() -> None:
    never = threading.Event()
    with running(ScriptedServer(hold=never)) as server:
        outcome = asyncio.run(
            stream_completion(
                Server.parse(server.url, None),
                "/v1/completions",
                {"prompt": "a", "max_tokens": 3},
                timeout_s=0.2,
            )
        )
        never.set()
    assert outcome.error == "no end after 0.2 s"
    assert outcome.text == "y"


def test_an_error_event_in_the_stream_fails_the_request() -> None:
    class Broken(ScriptedServer):
        async def _stream(self, body: Any, number: int, writer: asyncio.StreamWriter) -> None:
            self._send_chunk(writer, 'data: {"error": {"message": "NaN logits"}}\n\n')

    with running(Broken()) as server, pytest.raises(UserError, match="NaN logits"):
        measure(load(server), ignore)


def test_an_interruption_ends_requests_without_an_error() -> None:
    ended = []

    async def request() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def run() -> None:
        interrupted = asyncio.Event()
        asyncio.get_running_loop().call_soon(interrupted.set)
        await _unless(interrupted, asyncio.gather(request(), request()))

    asyncio.run(run())
    assert ended == [True, True]


def test_nobody_listens() -> None:
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:9") as caught:
        measure(ServeLoad(base_url="http://127.0.0.1:9"), ignore)
    assert "metainfer serve" in str(caught.value.hint)


def test_an_answer_that_is_not_http() -> None:
    class Rude(ScriptedServer):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            writer.close()

    with running(Rude()) as server, pytest.raises(ExchangeError, match="is not HTTP"):
        asyncio.run(get_json(Server.parse(server.url, None), "/v1/models", 5.0))


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://127.0.0.1:8000", Server("127.0.0.1", 8000, False, "", None)),
        ("http://host:81/v1/", Server("host", 81, False, "", None)),
        ("https://host/proxy/v1", Server("host", 443, True, "/proxy", None)),
        ("http://[::1]:90", Server("::1", 90, False, "", None)),
    ],
)
def test_urls(url: str, server: Server) -> None:
    assert Server.parse(url, None) == server


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://h:port"])
def test_what_is_not_a_url(url: str) -> None:
    with pytest.raises(UserError):
        Server.parse(url, None)
