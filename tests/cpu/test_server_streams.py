"""Streams: pings in silence, clients that vanish, and 64 of them at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from metainfer.llm.admission import Limits
from metainfer.server.settings import ServerSettings
from metainfer.text.tokenizer import Tokenizer
from tests.fakes.serving import MODEL, VOCAB, Bench, Served, scripted, serving, wait_for
from tests.fakes.shadow_engine import ShadowEngine
from tests.fakes.tiny_tokenizer import tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello?"}]
PING_S = 0.05
LONG = "and so on " * 200


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    settings = ServerSettings(ping_s=PING_S)
    with scripted(tmp_path_factory.mktemp("model"), settings) as bench:
        yield bench


@pytest.fixture
def bench(running: Bench) -> Iterator[Bench]:
    """The running server; whatever a test changes of its engine is put back."""
    yield running
    running.script.says = "Hello there."
    running.engine.tick_s = 0.0
    running.engine.flowing.set()
    wait_for(lambda: running.engine.num_live == 0)
    assert len(running.served.service.dispatcher) == 0


def aborts(bench: Bench) -> float | None:
    registry = bench.served.service.metrics._registry
    labels = {"model_name": MODEL, "finished_reason": "abort"}
    return registry.get_sample_value("metainfer:request_success_total", labels)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_comments_come_while_nothing_else_does(bench: Bench, path: str) -> None:
    bench.engine.flowing.clear()
    body = {"model": MODEL, "stream": True, "messages": MESSAGES, "prompt": "x"}
    del body["prompt" if path == CHAT else "messages"]
    lines: list[str] = []
    with bench.served.http() as http, http.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-cache"
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 3:
                bench.engine.flowing.set()
    kinds = [line[:6] for line in lines if line]
    assert kinds[:3] == [": ping"] * 3
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events
        for choice in event["choices"]
    )
    assert text == "Hello there."


def test_the_openai_client_reads_past_comments(bench: Bench) -> None:
    bench.engine.flowing.clear()
    client = bench.served.openai()
    stream = client.completions.create(model=MODEL, prompt="x", stream=True)
    wait_for(lambda: bench.engine.num_live == 1)
    time.sleep(3 * PING_S)
    bench.engine.flowing.set()
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello there."


def test_a_stream_that_is_left_is_aborted(bench: Bench) -> None:
    bench.script.says, bench.engine.tick_s = LONG, 0.002
    before, counted = len(bench.engine.aborted), aborts(bench) or 0
    with bench.served.openai() as client:
        stream: Any = client.completions.create(
            model=MODEL, prompt="x", max_tokens=1000, n=2, stream=True
        )
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
        assert bench.engine.num_live == 2
        stream.close()
    wait_for(lambda: bench.engine.num_live == 0)
    assert len(bench.engine.aborted) - before == 2
    wait_for(lambda: (aborts(bench) or 0) == counted + 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_the_first_token(bench: Bench, stream: bool) -> None:
    """Nothing is written that could fail: the server must be listening for the end."""
    bench.engine.flowing.clear()
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": stream}).encode()
    port = int(bench.served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: bench.engine.num_live == 1)
    wait_for(lambda: bench.engine.num_live == 0)


def test_a_client_that_hangs_up_in_the_middle_of_its_body(bench: Bench) -> None:
    port = int(bench.served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
        connection.sendall(head.encode() + b'{"messages"')
    with bench.served.http() as http:
        assert http.post(CHAT, json={"messages": MESSAGES}).status_code == 200
    assert bench.engine.num_live == 0


def test_an_answer_that_timed_out_at_the_client_is_aborted(bench: Bench) -> None:
    bench.engine.flowing.clear()
    client = bench.served.openai().with_options(timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="x")
    wait_for(lambda: bench.engine.num_live == 0)


# ---- the crowd: the real loop, scheduler and block pool ----

CLIENTS = 64
LIMITS = Limits(
    vocab_size=VOCAB,
    eos_token_ids=(1,),
    max_model_len=512,
    max_num_seqs=12,
    max_num_batched_tokens=96,
    max_queued_requests=200,
    num_blocks=5,  # less than the two choices of a long request need: one is preempted
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


def body_of(i: int) -> dict[str, Any]:
    """What client i asks for: prompts and answers of all lengths. Some ask for two long
    ones, which begin together and whose 3 blocks each are more than there are."""
    words = ["wind", "harbour", "dog", "fog", "lamp", "tide", "mate"]
    if i % 16 == 2:
        prompt = f"{i}: " + " ".join(words)
        more = {"max_tokens": 270, "temperature": 0, "n": 2, "ignore_eos": True}
        return {"model": MODEL, "prompt": prompt, **more}
    prompt = f"{i}: " + " ".join(words[(i * k) % 7] for k in range(3 + 17 * (i % 5)))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 20 + 13 * (i % 11), "temperature": 0}
    if i % 3 == 0:
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    if i % 7 == 0:
        body["stop"] = ["e"]
    return {**body, "prompt": prompt, "n": 1 + i % 2, "ignore_eos": i % 2 == 0}


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or message.get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


async def ask(
    http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None
) -> dict[int, str]:
    """The texts of a stream, or what came of them before the client left."""
    path = CHAT if "messages" in body else TEXT
    events = []
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if leave_after is not None and len(events) >= leave_after:
                    break
    return texts_of(events)


def test_64_clients_at_once_of_which_some_vanish(tokenizer: Tokenizer) -> None:
    with ShadowEngine(LIMITS) as engine, serving(engine, tokenizer) as served:
        with served.http() as http:
            solo = [
                texts_of([http.post(CHAT if "messages" in b else TEXT, json=b).json()])
                for b in map(body_of, range(CLIENTS))
            ]
        assert len({json.dumps(text) for text in solo}) > CLIENTS * 0.9, "they all differ"
        engine.runner.pause_s = 0.001
        before = engine.stats()
        together = asyncio.run(crowd(served))
        wait_for(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        after = engine.stats()
        assert after.alive and after.num_errors == 0
        assert len(served.service.dispatcher) == 0
        assert (after.num_free_blocks, after.num_free_slots) == (LIMITS.num_blocks, 12)
        assert (before.num_free_blocks, before.num_free_slots) == (LIMITS.num_blocks, 12)
        assert after.num_preemptions > before.num_preemptions, "the crowd was to be crowded"
        assert after.num_aborted > before.num_aborted
    left = 0
    for i, (alone, text) in enumerate(zip(solo, together, strict=True)):
        if i % 4 == 1:
            left += text != alone
            assert all(alone[k].startswith(text[k]) for k in text), i
        else:
            assert text == alone, i
    assert left > 5, "the test means clients to leave early"


async def crowd(served: Served) -> list[dict[int, str]]:
    """All clients at once; every fourth leaves in mid-stream, after 1, 3, 5, ... events."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
        leave = [1 + (i // 2) if i % 4 == 1 else None for i in range(CLIENTS)]
        return await asyncio.gather(*(ask(http, body_of(i), leave[i]) for i in range(CLIENTS)))


def test_a_stream_is_in_order(bench: Bench) -> None:
    bench.script.says = "".join(f"{i} " for i in range(100))
    client = bench.served.openai()
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=1000, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert all(int(a) + 1 == int(b) for a, b in pairwise(text.split()))
