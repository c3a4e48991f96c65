"""Chat completions with the real openai client, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from metainfer.text.parse import CALLS_CLOSE, CALLS_OPEN, DSML
from tests.fakes.serving import MODEL, Bench, scripted, wait_for

ASK: list[Any] = [{"role": "user", "content": "Hello?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = (
    f"\n\n{CALLS_OPEN}\n"
    f'<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n'
    f"</{DSML}invoke>\n{CALLS_CLOSE}"
)
ARGUMENTS = {"city": "Oslo", "days": 2}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with scripted(tmp_path_factory.mktemp("model")) as bench:
        yield bench


@pytest.fixture
def bench(running: Bench) -> Iterator[Bench]:
    """The running server; whatever a test changes of its engine is put back."""
    yield running
    running.script.says, running.script.answer = "Hello there.", None
    running.engine.cached_tokens, running.engine.tokens_per_event = 0, 1
    running.engine.flowing.set()
    wait_for(lambda: running.engine.num_live == 0)
    assert len(running.served.service.dispatcher) == 0


@pytest.fixture
def client(bench: Bench) -> OpenAI:
    return bench.served.openai()


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=ASK, **more)


def streamed(client: OpenAI, **more: Any) -> list[Any]:
    return list(ask(client, stream=True, **more))


def text_of(chunks: list[Any], field: str = "content", index: int = 0) -> str:
    return "".join(
        getattr(choice.delta, field, None) or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_an_answer(bench: Bench, client: OpenAI) -> None:
    bench.engine.cached_tokens = 3
    answer = ask(client, max_tokens=50, temperature=0.5, seed=7)
    assert answer.object == "chat.completion" and answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there.")
    assert (choice.finish_reason, choice.stop_reason, choice.logprobs) == ("stop", None, None)
    assert choice.message.tool_calls is None and choice.message.reasoning is None
    spoken = len(bench.tokenizer.encode("Hello there.")) + 1
    prompt = len(bench.last.prompt_token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, spoken)
    assert answer.usage.total_tokens == prompt + spoken
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    sampling = bench.last.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (50, 0.5, 7)
    shown = bench.tokenizer.decode(bench.last.prompt_token_ids, skip_special_tokens=False)
    assert shown == "<｜begin▁of▁sentence｜><｜User｜>Hello?<｜Assistant｜></think>"


def test_a_stream(bench: Bench, client: OpenAI) -> None:
    chunks = streamed(client, stream_options={"include_usage": True})
    *body, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert body[0].choices[0].delta.role == "assistant"
    assert text_of(body) == "Hello there."
    assert [c.choices[0].finish_reason for c in body] == [None] * (len(body) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in body)
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(bench.tokenizer.encode("Hello there.")) + 1
    assert len(body) > 4, "it comes in pieces"


def test_usage_with_every_chunk(client: OpenAI) -> None:
    chunks = streamed(
        client, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] <= 1 and counts[-1] > 3


def test_without_being_asked_for_usage_a_stream_has_none(client: OpenAI) -> None:
    chunks = streamed(client)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "Hello "), (True, "Hello there")])
def test_stop_strings_that_straddle_tokens(
    bench: Bench, client: OpenAI, stream: bool, include: bool, text: str
) -> None:
    assert len(bench.tokenizer.encode("there")) > 1
    more: dict[str, Any] = {"stop": ["there", "x"]}
    more["extra_body"] = {"include_stop_str_in_output": include}
    if stream:
        chunks = streamed(client, **more)
        choice, said = chunks[-1].choices[0], text_of(chunks)
    else:
        choice = ask(client, **more).choices[0]
        said = choice.message.content
    assert (said, choice.finish_reason, choice.stop_reason) == (text, "stop", "there")


def test_n_answers_with_seeds_that_count_up(bench: Bench, client: OpenAI) -> None:
    bench.script.answer = lambda request: bench.tokenizer.encode(f"I am {request.sampling.seed}.")
    answer = ask(client, n=3, seed=40)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == ["I am 40.", "I am 41.", "I am 42."]
    assert answer.usage.prompt_tokens == len(bench.last.prompt_token_ids), "it counts once"
    chunks = streamed(client, n=3, seed=40)
    assert [text_of(chunks, index=i) for i in range(3)] == ["I am 40.", "I am 41.", "I am 42."]
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == ["stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(bench: Bench, client: OpenAI, stream: bool) -> None:
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = streamed(client, **more)
        found = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
        content = [entry for entries in found for entry in entries]
    else:
        content = ask(client, **more).choices[0].logprobs.content
    ids = [*bench.tokenizer.encode("Hello there."), bench.engine.eos]
    assert [bytes(entry.bytes) for entry in content] == [
        bench.tokenizer.token_bytes(token_id) for token_id in ids
    ]
    assert "".join(e.token for e in content[:-1]) == "Hello there."
    for token_id, entry in zip(ids, content, strict=True):
        assert entry.logprob == -0.125 * (token_id % 8 + 1)
        assert [top.logprob for top in entry.top_logprobs] == [entry.logprob, entry.logprob - 1]
        assert entry.top_logprobs[0].token == entry.token


def test_characters_of_several_tokens_are_never_cut(bench: Bench, client: OpenAI) -> None:
    bench.script.says = "漢字 é 🙂"
    chunks = streamed(client)
    assert text_of(chunks) == "漢字 é 🙂"
    assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_comes_under_both_names(bench: Bench, client: OpenAI, stream: bool) -> None:
    bench.script.says = "Let me think.</think>Here it is."
    more: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    if stream:
        chunks = streamed(client, stream_options={"include_usage": True}, **more)
        usage = chunks[-1].usage
        reasoning = [text_of(chunks, name) for name in ("reasoning", "reasoning_content")]
        content = text_of(chunks)
    else:
        answer = ask(client, **more)
        message, usage = answer.choices[0].message, answer.usage
        reasoning, content = [message.reasoning, message.reasoning_content], message.content
    assert reasoning == ["Let me think."] * 2
    assert content == "Here it is."
    thought = len(bench.tokenizer.encode("Let me think.</think>"))
    assert usage.completion_tokens_details.reasoning_tokens == thought
    assert bench.tokenizer.token_text(bench.last.prompt_token_ids[-1]) == "<think>"


@pytest.mark.parametrize(
    ("switch", "last"),
    [
        ({"thinking": {"type": "enabled"}}, "<think>"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "</think>"),
        ({"chat_template_kwargs": {"thinking": True}}, "<think>"),
        ({}, "</think>"),
    ],
)
def test_switches_of_thinking(bench: Bench, client: OpenAI, switch: Any, last: str) -> None:
    ask(client, extra_body=switch)
    assert bench.tokenizer.token_text(bench.last.prompt_token_ids[-1]) == last


@pytest.mark.parametrize("effort", ["none", "low", "high"])
def test_effort(bench: Bench, client: OpenAI, effort: str) -> None:
    ask(client, reasoning_effort=effort)
    last = bench.tokenizer.token_text(bench.last.prompt_token_ids[-1])
    assert last == ("</think>" if effort == "none" else "<think>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call(bench: Bench, client: OpenAI, stream: bool) -> None:
    bench.script.says = "I look it up." + CALL
    if stream:
        chunks = streamed(client, tools=TOOLS)
        finish, content = chunks[-1].choices[0].finish_reason, text_of(chunks)
        calls = [t for c in chunks for t in c.choices[0].delta.tool_calls or ()]
        assert [call.index for call in calls] == [0]
    else:
        choice = ask(client, tools=TOOLS).choices[0]
        finish, content = choice.finish_reason, choice.message.content
        calls = choice.message.tool_calls
    (call,) = calls
    assert (finish, content) == ("tool_calls", "I look it up.")
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert call.id.startswith("call_")


def test_the_result_of_a_call_goes_back_to_the_model(bench: Bench, client: OpenAI) -> None:
    bench.script.says = CALL
    message = ask(client, tools=TOOLS).choices[0].message
    assert message.content is None
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    bench.script.says = "It rains."
    history: list[Any] = [*ASK, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."
    shown = bench.tokenizer.decode(bench.last.prompt_token_ids, skip_special_tokens=False)
    assert '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>' in shown
    assert "<｜User｜><tool_result>Rain.</tool_result><｜Assistant｜>" in shown


def test_tool_choice_none_offers_no_tools(bench: Bench, client: OpenAI) -> None:
    bench.script.says = "As text:" + CALL
    answer = ask(client, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == "As text:" + CALL
    assert answer.choices[0].finish_reason == "stop"
    shown = bench.tokenizer.decode(bench.last.prompt_token_ids, skip_special_tokens=False)
    assert "weather" not in shown


def test_every_sampling_field_reaches_the_engine(bench: Bench, client: OpenAI) -> None:
    ask(
        client,
        max_completion_tokens=9,
        top_p=0.5,
        presence_penalty=1.5,
        frequency_penalty=-1,
        logit_bias={"40": -100, "41": 3.5},
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.25,
            "stop_token_ids": [50],
            "ignore_eos": True,
            "min_tokens": 2,
            "allowed_token_ids": [40, 41, 50],
            "priority": -3,
        },
    )
    sampling = bench.last.sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1)
    assert sampling.repetition_penalty == 1.25
    assert dict(sampling.logit_bias) == {40: -100, 41: 3.5}
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((50,), True)
    assert sampling.allowed_token_ids == (40, 41, 50)
    assert bench.last.priority == -3


def test_a_chat_may_use_the_whole_context_unless_it_says_otherwise(
    bench: Bench, client: OpenAI
) -> None:
    ask(client)
    assert bench.last.sampling.max_tokens is None


def test_length_is_a_reason_to_finish(client: OpenAI) -> None:
    choice = ask(client, max_tokens=1).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == "H"


def test_fields_that_change_nothing_are_taken(client: OpenAI) -> None:
    answer = ask(
        client,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        service_tier="auto",
        logit_bias=None,
        extra_body={"prompt_cache_key": "k", "guided_json": None},
    )
    assert answer.choices[0].message.content == "Hello there."
