"""Bad requests: refused with OpenAI's error bodies that name what is wrong, and nothing breaks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from metainfer.server.settings import ServerSettings
from tests.fakes.fake_engine import ScriptError
from tests.fakes.serving import MODEL, VOCAB, Bench, error_of, scripted, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello?"}]
SETTINGS = ServerSettings(max_body_bytes=100_000, max_choices=8, retry_after_s=7)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with scripted(tmp_path_factory.mktemp("model"), SETTINGS) as bench:
        yield bench


@pytest.fixture
def bench(running: Bench) -> Iterator[Bench]:
    """The running server; whatever a test changes of its engine is put back."""
    yield running
    running.script.answer = None
    running.engine.max_running = running.engine.max_queued = 10_000
    running.engine.flowing.set()
    wait_for(lambda: running.engine.num_live == 0)
    assert len(running.served.service.dispatcher) == 0


@pytest.fixture
def http(bench: Bench) -> Iterator[httpx.Client]:
    with bench.served.http() as client:
        yield client


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", **more}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(tool_choice="required"), "tool_choice"),
        (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
        (CHAT, chat(response_format={"type": "json_schema"}), "response_format"),
        (CHAT, chat(parallel_tool_calls=False), "parallel_tool_calls"),
        (CHAT, chat(functions=[{"name": "f"}]), "functions"),
        (CHAT, chat(guided_json={}), "guided_json"),
        (CHAT, chat(structured_outputs={"regex": "a"}), "structured_outputs"),
        (CHAT, chat(modalities=["audio"]), "modalities"),
        (CHAT, chat(echo=True), "echo"),
        (CHAT, chat(chat_template="x"), "chat_template"),
        (CHAT, chat(store=True), "store"),
        (TEXT, text(suffix="x"), "suffix"),
        (TEXT, text(best_of=2), "best_of"),
        (TEXT, text(use_beam_search=True), "use_beam_search"),
        (TEXT, text(prompt_logprobs=1), "prompt_logprobs"),
        (TEXT, text(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    ],
)
def test_what_is_not_supported_is_named(
    http: httpx.Client, path: str, body: Any, param: str
) -> None:
    error = error_of(http.post(path, json=body))
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert param in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"model": MODEL}, "messages"),
        (CHAT, chat(messages="hello"), "messages"),
        (CHAT, chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role"),
        (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages"),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].type",
        ),
        (CHAT, chat(messages=[]), "messages"),
        (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
        (CHAT, chat(messages=[{"role": "assistant", "tool_calls": []}]), "messages[0].content"),
        (CHAT, chat(thinking={"type": "maybe"}), "thinking.type"),
        (
            CHAT,
            chat(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": False}),
            "thinking",
        ),
        (CHAT, chat(tempreature=1), "tempreature"),
        (CHAT, chat(temperature="hot"), "temperature"),
        (CHAT, chat(temperature=-1), "temperature"),
        (CHAT, chat(top_p=0), "top_p"),
        (CHAT, chat(max_tokens=0), "max_tokens"),
        (CHAT, chat(max_tokens=2.5), "max_tokens"),
        (CHAT, chat(max_tokens=True), "max_tokens"),
        (CHAT, chat(max_tokens=5, max_completion_tokens=6), "max_tokens"),
        (CHAT, chat(min_tokens=5, max_tokens=4), "min_tokens"),
        (CHAT, chat(n=0), "n"),
        (CHAT, chat(n=9), "n"),
        (CHAT, chat(stop=""), "stop"),
        (CHAT, chat(stop=["a"] * 17), "stop"),
        (CHAT, chat(seed=2**63), "seed"),
        (CHAT, chat(presence_penalty=3), "presence_penalty"),
        (CHAT, chat(repetition_penalty=1e-40), "repetition_penalty"),
        (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
        (CHAT, chat(logit_bias={str(VOCAB): 1}), "logit_bias"),
        (CHAT, chat(logit_bias={"5": 200}), "logit_bias"),
        (CHAT, chat(logit_bias={"9" * 5000: 1}), "logit_bias"),
        (CHAT, chat(logit_bias={"0" * 20 + "9" * 5000: 1}), "logit_bias"),
        (CHAT, chat(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (CHAT, chat(allowed_token_ids=[]), "allowed_token_ids"),
        (CHAT, chat(top_logprobs=2), "top_logprobs"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (CHAT, chat(reasoning_effort="enormous"), "reasoning_effort"),
        (CHAT, chat(stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
        (TEXT, text(stream=False, stream_options={}), "stream_options"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
        (
            CHAT,
            chat(tools=[{"type": "function", "function": {"name": "f", "strict": True}}]),
            "tools[0].function.strict",
        ),
        (TEXT, {"model": MODEL}, "prompt"),
        (TEXT, text(prompt=None), "prompt"),
        (TEXT, text(prompt=""), "prompt"),
        (TEXT, text(prompt=[]), "prompt"),
        (TEXT, text(prompt=[[]]), "prompt"),
        (TEXT, text(prompt=[1, "a"]), "prompt"),
        (TEXT, text(prompt=[1, True]), "prompt"),
        (TEXT, text(prompt=[VOCAB]), "prompt"),
        (TEXT, text(prompt=[-1]), "prompt"),
        (TEXT, text(prompt={"a": 1}), "prompt"),
        (TEXT, text(prompt=["x"] * 9), "n"),
        (TEXT, text(logprobs=True), "logprobs"),
        (TEXT, text(logprobs=21), "logprobs"),
        (TEXT, text(messages=[]), "messages"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_named(http: httpx.Client, path: str, body: Any, param: str) -> None:
    error = error_of(http.post(path, json=body))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"] and error["code"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": "\xff\xfe"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": NaN}',
        b'{"temperature": 1e999}',
        b"[" * 5000,
        b"[]",
        b"null",
        b'"text"',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, content: bytes) -> None:
    error = error_of(http.post(path, content=content))
    assert error["message"]


def test_long_bodies_are_refused_before_they_are_read(bench: Bench, http: httpx.Client) -> None:
    long = text(prompt="x" * SETTINGS.max_body_bytes)
    error = error_of(http.post(TEXT, json=long), 413)
    assert error["code"] == "body_too_large" and "100000 bytes" in error["message"]

    def pieces() -> Iterator[bytes]:  # chunked: no length is announced
        for _ in range(20):
            yield b" " * 10_000

    error_of(http.post(TEXT, content=pieces()), 413)
    assert http.post(TEXT, json=text()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_over_the_context_are_refused_with_both_numbers(
    bench: Bench, http: httpx.Client, stream: bool
) -> None:
    longest = bench.served.service.max_model_len
    error = error_of(http.post(TEXT, json=text(prompt=[5] * longest, stream=stream)))
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {longest} tokens" in error["message"]
    assert f"requested {longest + 1} tokens ({longest} in the prompt" in error["message"]
    error = error_of(http.post(CHAT, json=chat(max_tokens=longest)))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    exactly = text(prompt=[5] * longest, max_tokens=0, echo=True, logprobs=1)
    assert http.post(TEXT, json=exactly).status_code == 200


def test_texts_far_over_the_context_are_not_even_encoded(
    bench: Bench, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("nobody should encode this")

    monkeypatch.setattr(bench.served.service.tokenizer, "encode", fail)
    monkeypatch.setattr(bench.served.service.chat, "encode", fail)
    monkeypatch.setattr(bench.served.service, "max_model_len", 100)
    words = "dog and fog " * 5000
    parts = [{"type": "text", "text": words}]
    for path, body, param in (
        (TEXT, text(prompt=words), "prompt"),
        (TEXT, text(prompt=["x", words]), "prompt"),
        (CHAT, chat(messages=[{"role": "user", "content": words}]), "messages"),
        (CHAT, chat(messages=[{"role": "user", "content": parts}]), "messages"),
    ):
        error = error_of(http.post(path, json=body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "context length is 100 tokens" in error["message"] and "at least" in error["message"]


def test_the_openai_client_raises_what_it_should(bench: Bench) -> None:
    client = bench.served.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    assert "`gpt-5` does not exist" in missing.value.message
    assert f"This server has {MODEL}." in missing.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="")
    assert (bad.value.code, bad.value.param) == ("empty_prompt", "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_and_says_when_to_come_back(
    bench: Bench, http: httpx.Client, stream: bool
) -> None:
    bench.engine.flowing.clear()
    bench.engine.max_running = bench.engine.max_queued = 1
    answer = http.post(CHAT, json=chat(n=3, stream=stream))
    error = error_of(answer, 429)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert answer.headers["retry-after"] == "7"
    assert bench.engine.num_live == 0, "none of the three is left behind"


def test_an_error_of_the_model_before_and_during_a_stream(bench: Bench, http: httpx.Client) -> None:
    def fails(_: object) -> list[int]:
        raise ScriptError("The logits are not numbers.")

    bench.script.answer = fails
    error = error_of(http.post(CHAT, json=chat()), 500)
    assert error["message"] == "The logits are not numbers."
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    answer = http.post(CHAT, json=chat(stream=True, n=2))
    assert answer.status_code == 200
    frames = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert frames[-1] == "data: [DONE]"
    with pytest.raises(openai.APIError, match="not numbers"):
        list(
            bench.served.openai().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
            )
        )


def test_paths_and_methods_that_are_not_there(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "route_error"
    answer = http.get(CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert http.head("/health").status_code == 200


def test_methods_that_clients_make_up_are_one_series_and_one_word(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "metainfer"):
        for method in ("MADEUP1", "MADEUP2"):
            error_of(http.request(method, "/v1/models"), 405)
    page = http.get("/metrics").text
    assert 'method="other",model_name="tiny",route="/v1/models",status="405"} 2.0' in page
    assert "MADEUP" not in page and "MADEUP" not in caplog.text


def test_a_mistake_of_the_server_is_a_500_with_an_id(
    bench: Bench,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(bench.served.service.tokenizer, "encode", break_down)
    with caplog.at_level(logging.ERROR, "metainfer"):
        answer = http.post(TEXT, json=text(), headers={"X-Request-Id": "my-id-1"})
    error = error_of(answer, 500)
    assert "secret" not in answer.text
    assert "my-id-1" in error["message"] and answer.headers["x-request-id"] == "my-id-1"
    assert "ZeroDivisionError" in caplog.text


def test_ids_of_requests(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-Id": "a.B-1"}).headers["x-request-id"] == "a.B-1"
    made = {
        http.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"]
        for odd in ("", "a b", "x" * 129)
    }
    assert len(made) == 3 and not made & {"", "a b"}


def test_prompts_and_keys_are_not_logged(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "metainfer"):
        http.post(
            TEXT, json=text(prompt="a secret prompt"), headers={"Authorization": "Bearer k3y"}
        )
        http.post(TEXT, json=text(prompt="a secret prompt", top_p=9))
    assert "POST /v1/completions 200" in caplog.text
    assert "POST /v1/completions 400" in caplog.text
    assert "secret" not in caplog.text and "k3y" not in caplog.text
