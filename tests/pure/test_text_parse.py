"""Generated text to events: equal to the vendor's parser on good calls, and no text lost on bad."""

from __future__ import annotations

import json

import deepseek_recipe as recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.events import ReasoningDelta, TextDelta, ToolCallDelta
from metainfer.text.parse import (
    CALLS_CLOSE,
    CALLS_OPEN,
    DSML,
    THINK_CLOSE,
    OutputParser,
    ParsedDelta,
    read_call,
)

Call = tuple[str, dict[str, object]]


def parameter(key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    is_string = "true" if isinstance(value, str) else "false"
    return f'<{DSML}parameter name="{key}" string="{is_string}">{text}</{DSML}parameter>\n'


def invoke(name: str, arguments: dict[str, object]) -> str:
    body = "".join(parameter(k, v) for k, v in arguments.items())
    return f'<{DSML}invoke name="{name}">\n{body}</{DSML}invoke>\n'


def turn(thinking: str | None, text: str, calls: list[Call]) -> str:
    """What a model writes, by the grammar in `text.parse`."""
    out = "" if thinking is None else thinking + THINK_CLOSE
    out += text
    if calls:
        out += f"\n\n{CALLS_OPEN}\n{''.join(invoke(*call) for call in calls)}{CALLS_CLOSE}"
    return out


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def parsed(parser: OutputParser, pieces: list[str]) -> list[ParsedDelta]:
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def summary(deltas: list[ParsedDelta]) -> tuple[str, str, list[Call]]:
    """(thinking, text, calls) of some deltas."""
    calls = [d for d in deltas if isinstance(d, ToolCallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.call_id for call in calls}) == len(calls)
    return (
        "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        "".join(d.text for d in deltas if isinstance(d, TextDelta)),
        [(call.name or "", json.loads(call.arguments)) for call in calls],
    )


def vendor(text: str, thinking: bool) -> tuple[str, str, list[Call]]:
    """What deepseek-recipe's own stream parser makes of the text."""
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "x"}],
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    processor = recipe.StreamProcessor(generator, request.parsing_options)
    chunks = processor.push(recipe.InferenceChunk.ready())
    chunks += processor.push(recipe.InferenceChunk.text(text, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    chunks += processor.finish()
    reasoning, content, calls = "", "", {}
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                so_far = calls.setdefault(call["index"], ["", ""])
                so_far[0] += call["function"].get("name") or ""
                so_far[1] += call["function"].get("arguments") or ""
    return reasoning, content, [(name, json.loads(text)) for name, text in calls.values()]


# No markup inside, no blank edges: whether those belong to a part is a matter of taste.
words = st.text("abc <>/\né｜", max_size=20).map(lambda t: t.strip() + ".")
values = st.one_of(
    words, st.integers(-9, 9), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)
)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)


@given(st.none() | words, words, calls, st.data())
def test_good_turns_equal_the_vendors_parser_wherever_they_are_cut(
    thinking: str | None, text: str, calls: list[Call], data: st.DataObject
) -> None:
    raw = turn(thinking, text, calls)
    parser = OutputParser(thinking=thinking is not None, tools=True)
    got = summary(parsed(parser, pieces_of(raw, data)))
    assert got == (thinking or "", text, calls)
    assert got == vendor(raw, thinking is not None)
    assert parser.num_calls == len(calls)


FRAGMENTS = (
    CALLS_OPEN,
    CALLS_CLOSE,
    f'<{DSML}invoke name="f">',
    f"</{DSML}invoke>",
    parameter("k", "v"),
    parameter("n", 1),
    f'<{DSML}parameter name="n" string="false">{{</{DSML}parameter>',
    THINK_CLOSE,
    "\n\n",
    " ",
    "text",
    "<",
    DSML,
)
fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@given(fragments, st.booleans(), st.booleans(), st.data())
def test_any_cut_of_any_text_gives_the_same_parts(
    raw: str, thinking: bool, tools: bool, data: st.DataObject
) -> None:
    whole = summary(parsed(OutputParser(thinking, tools), [raw]))
    assert summary(parsed(OutputParser(thinking, tools), pieces_of(raw, data))) == whole


@given(fragments)
def test_without_a_complete_call_no_character_is_lost(raw: str) -> None:
    parser = OutputParser(thinking=False, tools=True)
    deltas = parsed(parser, [raw])
    if parser.num_calls == 0 and CALLS_CLOSE not in raw:
        assert summary(deltas)[1] == raw


@given(fragments)
def test_without_tools_markup_is_text(raw: str) -> None:
    assert summary(parsed(OutputParser(thinking=False, tools=False), [raw])) == ("", raw, [])


def test_a_cut_off_call_comes_out_as_text() -> None:
    raw = f"Well.\n\n{CALLS_OPEN}\n" + invoke("f", {"a": 1}) + f'<{DSML}invoke name="g">\n'
    thinking, text, calls = summary(parsed(OutputParser(False, True), list(raw)))
    assert (thinking, calls) == ("", [("f", {"a": 1})])
    assert text == "Well." + f'\n<{DSML}invoke name="g">\n'


def test_calls_come_as_soon_as_they_are_complete_and_text_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(thinking=True, tools=True)
    assert parser.feed("Let me see.</thi") == [ReasoningDelta("Let me see.")]
    assert parser.is_thinking
    assert parser.feed("nk>Yes.\n") == [TextDelta("Yes.")]
    assert not parser.is_thinking
    assert parser.feed("\nBut") == [TextDelta("\n\nBut")]
    assert parser.feed(CALLS_OPEN + "\n") == []
    assert parser.feed(invoke("f", {})[:-2]) == []
    (call,) = parser.feed(">\n")
    assert isinstance(call, ToolCallDelta)
    assert (call.index, call.name, call.arguments) == (0, "f", "{}")
    assert call.call_id.startswith("call_")
    assert parser.feed(CALLS_CLOSE + "\n") == []
    assert parser.feed(" After all.") == [TextDelta("After all.")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        (parameter("k", 'a "quoted"\nline'), {"k": 'a "quoted"\nline'}),
        (parameter("k", {"deep": [1, None]}), {"k": {"deep": [1, None]}}),
        (parameter("k", 1).replace(">1<", ">one<"), {"k": "one"}),  # claims to be JSON
        (parameter("k", 1).replace(">1<", ">NaN<"), {"k": "NaN"}),
        (parameter("k", 1).replace(">1<", f">{'[' * 5000}<"), {"k": "[" * 5000}),
        ("stray text", None),
        (f'<{DSML}parameter name="k">v</{DSML}parameter>', None),
    ],
)
def test_arguments_are_always_one_json_object(
    body: str, arguments: dict[str, object] | None
) -> None:
    call = read_call(f'<{DSML}invoke name="f">{body}</{DSML}invoke>')
    if arguments is None:
        assert call is None
    else:
        assert call is not None
        assert (call[0], json.loads(call[1])) == ("f", arguments)


def test_a_call_without_a_name_is_none() -> None:
    assert read_call(f"<{DSML}invoke>x</{DSML}invoke>") is None
    assert read_call("anything") is None
