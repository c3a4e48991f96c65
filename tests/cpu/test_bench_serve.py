"""`bench serve` against a scripted server: what it counts, how it times, how it fails."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench.http_stream import ExchangeError, Outcome, Server, get_json, stream_completion
from metainfer.bench.record import commit, table, write_json
from metainfer.bench.serve import Measured, Run, _unless, measure
from metainfer.bench.serve_report import meets, percentile, record, summary, text_report
from metainfer.bench.serve_settings import (
    ServeLoad,
    ServeResults,
    parse_goal,
    parse_metrics,
    parse_percentiles,
)
from metainfer.bench.workload import (
    Calibration,
    RandomWords,
    TextPassages,
    arrival_times_s,
    make_asks,
)
from metainfer.core.errors import UserError

TOKENS_PER_WORD = 3
TEMPLATE_TOKENS = 5


@dataclass
class ScriptedServer:
    """Answers like an OpenAI server; a prompt costs TEMPLATE_TOKENS + TOKENS_PER_WORD per word."""

    failing: frozenset[int] = frozenset()  # which completions (by number) get status 503
    cut: frozenset[int] = frozenset()  # which end in mid-stream
    with_usage: bool = True
    hold: threading.Event | None = None  # answers wait for it after their first token
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            if head.startswith("GET /v1/models "):
                self._send_json(writer, 200, {"data": [{"id": "scripted"}]})
            elif head.startswith("GET"):
                self._send_json(writer, 404, {"error": {"message": "no such route"}})
            else:
                length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                await self._complete(json.loads(await reader.readexactly(length)), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        if number in self.failing:
            self._send_json(writer, 503, {"error": {"message": "the queue is\nfull"}})
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            await self._stream(body, number, writer)
        finally:
            self.in_flight -= 1

    async def _stream(
        self, body: dict[str, Any], number: int, writer: asyncio.StreamWriter
    ) -> None:
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        self._send_chunk(writer, ": ping\n\n")
        for step in range(body["max_tokens"]):
            piece = {"delta": {"content": "y"}} if chat else {"text": "y"}
            self._send_chunk(writer, f"data: {json.dumps({'choices': [piece]})}\n\n")
            await writer.drain()
            await asyncio.sleep(0.001)
            if number in self.cut:
                return
            while self.hold is not None and step == 0 and not self.hold.is_set():
                await asyncio.sleep(0.01)
        usage = {
            "prompt_tokens": TEMPLATE_TOKENS + TOKENS_PER_WORD * len(prompt.split()),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self.with_usage:
            # Split inside an event: lines must be put together again.
            event = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            self._send_chunk(writer, event[:20])
            self._send_chunk(writer, event[20:])
        self._send_chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _send_chunk(writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    @staticmethod
    def _send_json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        text = json.dumps(body)
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """The server on a free loopback port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    started = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        started.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


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


def test_arrivals_have_the_rate_and_the_shape() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = list(islice(arrival_times_s(3, 10.0, burstiness), 20_000))
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert mean == pytest.approx(0.1, rel=0.05)
        assert variance == pytest.approx(0.01 / burstiness, rel=0.1)
    assert list(islice(arrival_times_s(3, math.inf, 1.0), 3)) == [0.0, 0.0, 0.0]


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


def test_text_passages_never_overlap_and_end_in_an_error(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{n}" for n in range(100)), encoding="utf-8")
    source = TextPassages(path, seed=3)
    words = [word for _ in range(10) for word in source.passage(10).split()]
    assert sorted(words) == sorted(f"w{n}" for n in range(100))
    with pytest.raises(UserError, match="too few for prompts without repeats"):
        source.passage(1)


def test_a_dataset_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        TextPassages(path, seed=0)
    path.write_bytes(b" \n")
    with pytest.raises(UserError, match="holds no words"):
        TextPassages(path, seed=0)


def test_calibration_solves_for_words() -> None:
    calibration = Calibration.through((16, 53), (144, 437))
    assert calibration == Calibration(5.0, 3.0)
    asks = make_asks(RandomWords(1), calibration, 7, 50, (305, 10), 0.2)
    counts = [5 + 3 * len(ask.prompt.split()) for ask in asks]
    assert all(305 * 0.8 - 3 <= count <= 305 * 1.2 + 3 for count in counts)
    assert len(set(counts)) > 10
    assert calibration.words_for(1) == 1


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "error": "",
        "started_s": 0.0,
        "latency_s": 1.0,
        "ttft_s": 0.2,
        "gaps_s": (0.4, 0.4),
        "prompt_tokens": 10,
        "output_tokens": 3,
    }
    return Outcome(**(values | changes))


def test_time_per_output_token_leaves_out_the_first() -> None:
    assert outcome().tpot_s == pytest.approx(0.4)
    assert outcome(output_tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (25, 1.75), (50, 2.5), (99, 3.97), (100, 4.0)]
)
def test_percentiles_are_linear_between_ranks(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)
    assert percentile([7.0], percent) == 7.0


def test_goodput_counts_what_kept_every_bound() -> None:
    goals = (parse_goal("ttft:300"), parse_goal("tpot:500"))
    assert meets(outcome(), goals)
    assert not meets(outcome(ttft_s=0.31), goals)
    assert not meets(outcome(latency_s=1.3), goals)
    run = Run((outcome(), outcome(ttft_s=0.31)), 2.0, False)
    assert summary(run, ServeResults(goodput=goals))["request_goodput"] == 0.5


def test_the_record_is_json_with_vllms_keys_and_where_it_comes_from() -> None:
    runs = tuple(Run((outcome(),), duration_s, False) for duration_s in (1.0, 4.0, 2.0))
    measured = Measured("pebble", 5, runs)
    results = ServeResults(save_detailed=True, goodput=(("ttft", 500.0),))
    made = record(measured, ServeLoad(), results, {"cpu": "one"})
    again = json.loads(json.dumps(made, allow_nan=False))
    wanted = (
        "duration completed failed total_input_tokens total_output_tokens request_throughput"
        " request_goodput output_throughput total_token_throughput mean_ttft_ms median_ttft_ms"
        " std_ttft_ms p99_ttft_ms mean_tpot_ms mean_itl_ms mean_e2el_ms"
        " date command commit versions machine repeats seed"
    )
    assert set(wanted.split()) <= set(again)
    assert again["duration"] == 2.0  # the run of median throughput
    assert again["spread"]["total_token_throughput"] == [13 / 4, 13.0]
    assert again["request_rate"] == "inf"
    assert len(again["runs"][0]["requests"]) == 1
    text = text_report(made, results)
    assert "13 tokens" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_run_without_any_success_has_no_distribution() -> None:
    made = record(
        Measured("m", 0, (Run((outcome(error="refused"),), 1.0, True),)),
        ServeLoad(), ServeResults(), {},
    )  # fmt: skip
    assert made["completed"] == 0
    assert "mean_ttft_ms" not in made
    assert "failed: refused" in text_report(made, ServeResults())


def test_values_of_flags() -> None:
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    for parse, text in (
        (parse_metrics, "ttft,speed"),
        (parse_percentiles, "101"),
        (parse_goal, "itl:3"),
    ):
        with pytest.raises(UserError):
            parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompts": 0}, {"request_rate": 0.0}, {"max_concurrency": 0}, {"burstiness": 0.0},
        {"random_range_ratio": 1.0}, {"dataset_name": "text"}, {"repeats": 0},
        {"dataset_path": Path("x")}, {"random_input_len": 0}, {"random_output_len": 0},
    ],
)  # fmt: skip
def test_loads_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ServeLoad(**changes)


def test_records_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_tables_are_aligned() -> None:
    assert table(["name", "ms"], [["a", "1.0"], ["longer", "12.5"]]).splitlines() == [
        "name      ms",
        "------  ----",
        "a        1.0",
        "longer  12.5",
    ]


def test_the_commit_is_a_hash_or_unknown() -> None:
    name = commit().rstrip("+")
    assert name == "unknown" or len(name) == 40
