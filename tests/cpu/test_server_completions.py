"""Text completions: prompts of every form, echo with log-probabilities, tokenize, detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.fakes.fake_engine import fake_logprobs
from tests.fakes.serving import MODEL, VOCAB, Bench, scripted, wait_for


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with scripted(tmp_path_factory.mktemp("model")) as bench:
        yield bench


@pytest.fixture
def bench(running: Bench) -> Iterator[Bench]:
    """The running server; whatever a test changes of its engine is put back."""
    yield running
    running.script.says, running.script.answer = "Hello there.", None
    running.engine.tokens_per_event = 1
    wait_for(lambda: running.engine.num_live == 0)


@pytest.fixture
def client(bench: Bench) -> OpenAI:
    return bench.served.openai()


def complete(client: OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **more)


def streamed(client: OpenAI, prompt: Any, **more: Any) -> list[Any]:
    return list(complete(client, prompt, stream=True, **more))


def test_a_completion(bench: Bench, client: OpenAI) -> None:
    answer = complete(client, "One day")
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("Hello there.", "stop", None)
    assert bench.last.prompt_token_ids == tuple(bench.tokenizer.encode("One day"))
    assert bench.last.sampling.max_tokens == 16, "OpenAI's default for this endpoint"
    assert answer.usage.prompt_tokens == len(bench.last.prompt_token_ids)


def test_a_stream(client: OpenAI) -> None:
    *body, usage = streamed(client, "One day", stream_options={"include_usage": True})
    assert "".join(c.choices[0].text for c in body) == "Hello there."
    assert [c.choices[0].finish_reason for c in body] == [None] * (len(body) - 1) + ["stop"]
    assert usage.choices == [] and usage.usage.completion_tokens > 1


def test_prompts_of_every_form(bench: Bench, client: OpenAI) -> None:
    bench.script.answer = lambda request: request.prompt_token_ids
    ids = [bench.tokenizer.encode(text) for text in ("red", "blue sky")]

    def texts(prompt: Any, **more: Any) -> list[str]:
        choices = complete(client, prompt, **more).choices
        assert [c.index for c in choices] == list(range(len(choices)))
        return [c.text for c in choices]

    assert texts("red") == texts(ids[0]) == texts(["red"]) == texts([ids[0]]) == ["red"]
    assert texts(["red", "blue sky"]) == texts(ids) == ["red", "blue sky"]
    assert texts(["red", "blue sky"], n=2) == ["red", "red", "blue sky", "blue sky"]
    chunks = streamed(client, ids)
    parts = [[c.choices[0].text for c in chunks if c.choices[0].index == i] for i in (0, 1)]
    assert ["".join(part) for part in parts] == ["red", "blue sky"]


def test_usage_of_several_prompts_and_choices(bench: Bench, client: OpenAI) -> None:
    usage = complete(client, ["red", "blue sky"], n=2, max_tokens=2).usage
    prompt = sum(len(bench.tokenizer.encode(text)) for text in ("red", "blue sky"))
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 8)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(bench: Bench, client: OpenAI, stream: bool, group: int) -> None:
    bench.engine.tokens_per_event = group
    bench.script.says = "é x."
    if stream:
        found = [c.choices[0].logprobs for c in streamed(client, "One", logprobs=1)]
        pieces = [piece for piece in found if piece is not None]
        assert len(pieces) > 1
    else:
        pieces = [complete(client, "One", logprobs=1).choices[0].logprobs]
    ids = [*bench.tokenizer.encode("é x."), bench.engine.eos]
    expected = fake_logprobs(ids, 1)
    assert [p for piece in pieces for p in piece.token_logprobs] == [e.logprob for e in expected]
    tokens = [t for piece in pieces for t in piece.tokens]
    assert tokens == [bench.tokenizer.token_text(t) for t in ids]
    tops = [t for piece in pieces for t in piece.top_logprobs]
    assert tops == [{t: e.logprob} for t, e in zip(tokens, expected, strict=True)]
    offsets = [o for piece in pieces for o in piece.text_offset]
    text, starts = "", []
    for n in range(len(ids)):
        starts.append(len(text))
        # Bytes of an unfinished character count once it is whole.
        text = bench.tokenizer.decode(ids[: n + 1]).rstrip("\ufffd")
    assert offsets == starts


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_an_evaluation_harness_asks(bench: Bench, client: OpenAI, max_tokens: int) -> None:
    """As lm-eval does it: batches of token ids, echoed with the log-probability of each."""
    prompts = [bench.tokenizer.encode(text) for text in ("the harbour lay", "a dog")]
    bench.script.says = ""  # the one token asked for is the end of the text
    answer = complete(
        client, prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        scored = [*prompt, *[bench.engine.eos] * max_tokens]
        logprobs = choice.logprobs
        assert logprobs.tokens == [bench.tokenizer.token_text(t) for t in scored]
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        expected = [e.logprob for e in fake_logprobs(scored[1:], 1)]
        assert logprobs.token_logprobs[1:] == expected
        # The harness takes a token for greedy if none of the top ones is likelier.
        assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == expected
        assert choice.text == bench.tokenizer.decode(prompt)
        assert choice.finish_reason == ("stop" if max_tokens else "length")
    assert bench.last.sampling.prompt_logprobs == 1
    assert answer.usage.completion_tokens == 2 * max_tokens


def test_an_echo_goes_before_the_completion(bench: Bench, client: OpenAI) -> None:
    answer = complete(client, "Say: ", echo=True)
    assert answer.choices[0].text == "Say: Hello there."
    assert bench.last.sampling.prompt_logprobs is None
    assert "".join(c.choices[0].text for c in streamed(client, "Say: ", echo=True)) == (
        "Say: Hello there."
    )
    logprobs = complete(client, "Say: ", echo=True, logprobs=0).choices[0].logprobs
    assert "".join(logprobs.tokens[:-1]) == "Say: Hello there."
    at = dict(zip(logprobs.text_offset, logprobs.tokens, strict=True))
    assert at[5] == "H"


def test_an_echo_in_a_stream_has_its_logprobs_in_the_first_chunk(
    bench: Bench, client: OpenAI
) -> None:
    chunks = streamed(client, "Say: ", echo=True, logprobs=0)
    first = chunks[0].choices[0]
    assert first.text == "Say: "
    assert first.logprobs.tokens == [
        bench.tokenizer.token_text(t) for t in bench.tokenizer.encode("Say: ")
    ]
    assert first.logprobs.token_logprobs[0] is None


def test_special_tokens_are_shown_on_request(bench: Bench, client: OpenAI) -> None:
    bench.script.answer = lambda _: [*bench.tokenizer.encode("a"), 1, *bench.tokenizer.encode("b")]
    more = {"ignore_eos": True}
    assert complete(client, "x", max_tokens=3, extra_body=more).choices[0].text == "ab"
    more["skip_special_tokens"] = False
    answer = complete(client, "x", max_tokens=3, extra_body=more)
    assert answer.choices[0].text == "a<｜end▁of▁sentence｜>b"


def test_a_stop_token_is_told(bench: Bench, client: OpenAI) -> None:
    first, second, *_ = bench.tokenizer.encode("Hello there.")
    choice = complete(client, "x", extra_body={"stop_token_ids": [second]}).choices[0]
    assert (choice.text, choice.finish_reason) == (bench.tokenizer.decode([first]), "stop")
    assert choice.stop_reason == second


def test_tokens_and_text_and_back(bench: Bench) -> None:
    with bench.served.http() as http:
        for prefix in ("", "/v1"):
            made = http.post(f"{prefix}/tokenize", json={"prompt": "Hi é<think>"}).json()
            assert made["tokens"] == bench.tokenizer.encode("Hi é<think>")
            assert made["count"] == len(made["tokens"])
            assert made["max_model_len"] == bench.served.service.max_model_len
            back = http.post(f"{prefix}/detokenize", json={"tokens": made["tokens"]})
            assert back.json() == {"prompt": "Hi é<think>"}
        body = {"model": MODEL, "prompt": "Hi", "return_token_strs": True}
        assert "".join(http.post("/tokenize", json=body).json()["token_strs"]) == "Hi"
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_long_texts_are_taken_apart_beside_the_event_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of work for the longest ones, in which nobody else would be answered."""
    tokenizer = bench.served.service.tokenizer
    found = []

    def beside_the_loop(*_: Any) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        found.append(True)
        return ""

    for name in ("token_text", "decode"):
        monkeypatch.setattr(tokenizer, name, beside_the_loop)
    with bench.served.http() as http:
        http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True})
        http.post("/detokenize", json={"tokens": [40]})
    assert len(found) >= 2


def test_the_tokens_of_a_conversation_are_those_the_model_gets(
    bench: Bench, client: OpenAI
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    client.chat.completions.create(model=MODEL, messages=messages)
    with bench.served.http() as http:
        made = http.post("/tokenize", json={"messages": messages}).json()
    assert tuple(made["tokens"]) == bench.last.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "tokens": []}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_bad_requests_for_tokens(bench: Bench, path: str, body: Any, param: str) -> None:
    with bench.served.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
