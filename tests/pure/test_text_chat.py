"""Conversations to prompts in DeepSeek-V4's encoding; special tokens only where they belong."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import RequestError, UserError
from metainfer.text.chat import ChatEncoder
from metainfer.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import BOS, EOS, tiny_tokenizer, write_tokenizer

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
HISTORY_WITH_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I add.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer, thinking=False)


def prompt(encoder: ChatEncoder, tokenizer: Tokenizer, *messages: Any, **more: Any) -> str:
    ids = encoder.encode(messages, **more).token_ids
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_conversation_in_the_models_own_form(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    text = prompt(
        encoder,
        tokenizer,
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    )
    assert text == (
        f"{BOS}Be brief.{USER}Hello.{ASSISTANT}</think>Yes?{EOS}{USER}A\n\nB{ASSISTANT}</think>"
    )


def test_markup_is_one_token_but_its_spelling_in_a_message_is_text(
    encoder: ChatEncoder, tokenizer: Tokenizer
) -> None:
    said = f"I type {EOS}{USER} and <think>"
    ids = encoder.encode([{"role": "user", "content": said}]).token_ids
    markup = [token for token in map(tokenizer.token_text, ids) if token.startswith("<")]
    assert [t for t in markup if len(t) > 2] == [BOS, USER, ASSISTANT, "</think>"]
    assert said in tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, False),
        ({"thinking": True}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": False, "reasoning_effort": "max"}, False),
        ({"thinking": True, "reasoning_effort": "none"}, True),
    ],
)
def test_who_decides_about_thinking(
    encoder: ChatEncoder, tokenizer: Tokenizer, asked: Mapping[str, Any], thinks: bool
) -> None:
    made = encoder.encode([{"role": "user", "content": "x"}], **asked)
    assert made.thinking is thinks
    assert made.parser().is_thinking is thinks
    assert tokenizer.token_text(made.token_ids[-1]) == ("<think>" if thinks else "</think>")


def test_the_models_default_is_to_think_or_not(tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": "x"}
    assert ChatEncoder(tokenizer, thinking=True).encode([message]).thinking
    assert not ChatEncoder(tokenizer, thinking=False).encode([message]).thinking


def test_effort_is_told_to_the_model(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": "x"}
    texts = {
        effort: prompt(encoder, tokenizer, message, reasoning_effort=effort)
        for effort in ("low", "high", "max")
    }
    assert texts["low"] == f"{BOS}{USER}x{ASSISTANT}<think>"
    assert len(set(texts.values())) == 3
    with pytest.raises(RequestError, match=r"reasoning_effort must be one of none, .*max"):
        encoder.encode([message], reasoning_effort="enormous")


def test_tools_calls_and_results_are_part_of_the_prompt(
    encoder: ChatEncoder, tokenizer: Tokenizer
) -> None:
    made = encoder.encode(HISTORY_WITH_CALL, tools=[ADD], thinking=True, reasoning_effort="low")
    assert made.tools
    text = tokenizer.decode(made.token_ids, skip_special_tokens=False)
    assert json.dumps({"name": "add", "description": "Adds."})[:-1] in text
    assert "<think>I add.</think>" in text  # reasoning stays where there are tools
    assert '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>' in text
    assert '<｜DSML｜parameter name="b" string="true">x</｜DSML｜parameter>' in text
    assert f"{USER}<tool_result>2</tool_result>{ASSISTANT}<think>" in text


def test_both_spellings_of_reasoning_and_of_the_system_role_are_read(
    encoder: ChatEncoder,
) -> None:
    renamed = [dict(message) for message in HISTORY_WITH_CALL]
    renamed[1]["reasoning_content"] = renamed[1].pop("reasoning")
    spelled = [
        encoder.encode([{"role": role, "content": "Brief."}, *history], tools=[ADD], thinking=True)
        for role, history in (("system", HISTORY_WITH_CALL), ("developer", renamed))
    ]
    assert spelled[0] == spelled[1]


def test_a_function_without_parameters_is_a_tool(encoder: ChatEncoder) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    assert encoder.encode([{"role": "user", "content": "x"}], tools=[tool]).tools


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "2"}],
        [{"role": "user", "content": "\ud800"}],
        HISTORY_WITH_CALL[:2],
        [{"role": "sage", "content": "x"}],
    ],
    ids=["none", "result without id", "surrogate", "call without result", "role"],
)
def test_conversations_that_cannot_be_are_refused(
    encoder: ChatEncoder, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError) as caught:
        encoder.encode(messages)
    assert caught.value.param == "messages"
    assert caught.value.message


def test_tools_that_are_nested_too_deeply_are_refused(encoder: ChatEncoder) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(150):
        parameters = {"properties": parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(RequestError, match="nested too deeply"):
        encoder.encode([{"role": "user", "content": "x"}], tools=[tool])


def test_a_tokenizer_without_the_markup_cannot_chat(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<think>", "<thunk>"))
    with pytest.raises(UserError, match=r"lacks tokens of the chat format: <think>"):
        ChatEncoder(Tokenizer.load(tmp_path), thinking=True)


def test_a_tokenizer_that_the_library_does_not_read_cannot_chat(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "to_json", lambda: '{"version": "of a later kind"}')
    with pytest.raises(
        UserError, match=r"deepseek-recipe does not read .*tokenizer\.json"
    ) as caught:
        ChatEncoder(tokenizer, thinking=True)
    assert caught.value.hint == "the model can complete text, but it cannot chat"


def test_without_the_library_the_extra_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_import = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "deepseek_recipe":
            raise ImportError(name)
        return plain_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match="deepseek-recipe") as caught:
        ChatEncoder(tokenizer, thinking=True)
    assert caught.value.hint == "pip install 'metainfer[server]'"
