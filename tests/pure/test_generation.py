"""Engine events to text events: stop strings, log-probabilities, thinking, tool calls, endings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.events import (
    FinishEvent,
    FinishReason,
    GenerationEnd,
    PromptEvent,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    TokenEvent,
    ToolCallDelta,
    Usage,
)
from metainfer.llm.generation import Generation, TextOptions
from metainfer.llm.request import Request, SamplingParams
from metainfer.text.parse import CALLS_CLOSE, CALLS_OPEN, DSML, OutputParser
from metainfer.text.tokenizer import Tokenizer
from tests.fakes.fake_engine import fake_logprobs
from tests.fakes.tiny_tokenizer import tiny_tokenizer

EOS = 1
CALL = f'{CALLS_OPEN}\n<{DSML}invoke name="f">\n</{DSML}invoke>\n{CALLS_CLOSE}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make(
    tokenizer: Tokenizer,
    options: TextOptions | None = None,
    parser: OutputParser | None = None,
    **sampling: object,
) -> Generation:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = Request("r", (5, 6, 7), params, arrival_s=0.0)
    return Generation(request, tokenizer, (EOS,), options or TextOptions(), parser)


def run(
    generation: Generation,
    token_ids: Sequence[int],
    group: int = 1,
    reason: FinishReason = FinishReason.STOP,
    stop_token: int | None = EOS,
) -> list[TextEvent]:
    """Push tokens, `group` at a time, until the generation stops, then the end."""
    events: list[TextEvent] = []
    wanted = generation.request.sampling.logprobs
    pushed = 0
    for at in range(0, len(token_ids), group):
        ids = tuple(token_ids[at : at + group])
        pushed += len(ids)
        events += generation.push(TokenEvent("r", ids, fake_logprobs(ids, wanted)))
        if generation.stopped:
            reason, stop_token = FinishReason.ABORT, None
            break
    stop_logprob = None
    if stop_token is not None:
        stop_logprob = next(iter(fake_logprobs([stop_token], wanted)), None)
    usage = Usage(3, pushed + (stop_token is not None), 2)
    return events + generation.push(
        FinishEvent("r", reason, usage, stop_token, stop_logprob=stop_logprob)
    )


def text_of(events: Sequence[TextEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def end_of(events: Sequence[TextEvent]) -> GenerationEnd:
    end = events[-1]
    assert isinstance(end, GenerationEnd)
    assert not any(isinstance(event, GenerationEnd) for event in events[:-1])
    return end


@given(st.text(max_size=40), st.integers(1, 5))
def test_text_is_whole_however_tokens_are_grouped(
    tokenizer: Tokenizer, text: str, group: int
) -> None:
    events = run(make(tokenizer), tokenizer.encode(text), group)
    assert text_of(events) == tokenizer.decode(tokenizer.encode(text))
    assert end_of(events) == GenerationEnd(
        FinishReason.STOP, Usage(3, len(tokenizer.encode(text)) + 1, 2)
    )


@pytest.mark.parametrize("group", [1, 3, 100])
@pytest.mark.parametrize(
    ("include", "shown"), [(False, "the harbour "), (True, "the harbour lay so")]
)
def test_a_stop_string_that_straddles_tokens(
    tokenizer: Tokenizer, include: bool, shown: str, group: int
) -> None:
    ids = tokenizer.encode("the harbour lay so still")
    generation = make(tokenizer, TextOptions(("lay so", "never"), include))
    events = run(generation, ids, group)
    assert text_of(events) == shown
    end = end_of(events)
    assert (end.reason, end.stop_reason) == (FinishReason.STOP, "lay so")
    # Tokens up to the one that completed the stop string, and no cached count lost.
    needed = next(n for n in range(len(ids)) if "lay so" in tokenizer.decode(ids[:n]))
    assert end.usage == Usage(3, needed, 2)
    assert len(tokenizer.encode("lay so")) > 1, "the test means to straddle"


def test_text_that_only_might_be_a_stop_string_comes_in_the_end(tokenizer: Tokenizer) -> None:
    events = run(make(tokenizer, TextOptions(("lay so long",))), tokenizer.encode("it lay so"))
    assert text_of(events) == "it lay so"
    assert end_of(events).stop_reason is None


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a.b.c.d")
    assert len(ids) == 7
    generation = make(tokenizer, TextOptions((".",)), min_tokens=3)
    assert text_of(run(generation, ids)) == "a.b"
    generation = make(tokenizer, TextOptions((".",)), min_tokens=4)
    assert text_of(run(generation, ids)) == "a.b.c"


def test_what_ended_the_output_is_told_apart(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    by_eos = end_of(run(make(tokenizer), ids))
    assert (by_eos.reason, by_eos.stop_reason) == (FinishReason.STOP, None)
    by_token = end_of(run(make(tokenizer, stop_token_ids=(40,)), ids, stop_token=40))
    assert (by_token.reason, by_token.stop_reason) == (FinishReason.STOP, 40)
    by_length = end_of(run(make(tokenizer), ids, reason=FinishReason.LENGTH, stop_token=None))
    assert (by_length.reason, by_length.stop_reason) == (FinishReason.LENGTH, None)
    generation = make(tokenizer)
    (error,) = generation.push(FinishEvent("r", FinishReason.ERROR, Usage(3, 0), error="It broke."))
    assert error == GenerationEnd(FinishReason.ERROR, Usage(3, 0), error="It broke.")
    assert generation.push(TokenEvent("r", (40,))) == [], "nothing comes after the end"


def test_a_stop_token_is_text_where_it_is_wanted(tokenizer: Tokenizer) -> None:
    (dot,) = tokenizer.encode(".")
    ids = tokenizer.encode("abc")
    for include, shown in ((False, "abc"), (True, "abc.")):
        generation = make(tokenizer, TextOptions(include_stop=include), stop_token_ids=(dot,))
        assert text_of(run(generation, ids, stop_token=dot)) == shown


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), EOS, *tokenizer.encode("b")]
    assert text_of(run(make(tokenizer, ignore_eos=True), ids)) == "ab"
    shown = run(make(tokenizer, TextOptions(skip_special_tokens=False), ignore_eos=True), ids)
    assert text_of(shown) == "a<｜end▁of▁sentence｜>b"


@given(st.text("abc é漢<", max_size=30), st.integers(1, 4), st.booleans())
def test_every_token_has_its_logprob_once_and_in_order(
    tokenizer: Tokenizer, text: str, group: int, stops: bool
) -> None:
    ids = tokenizer.encode(text)
    options = TextOptions(("<a", "b ") if stops else ())
    generation = make(tokenizer, options, logprobs=2)
    events = run(generation, ids, group)
    logprobs = [p for event in events if isinstance(event, TextDelta) for p in event.logprobs]
    token_ids = [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]
    if end_of(events).stop_reason is None:
        assert token_ids == ids
        assert logprobs == list(fake_logprobs([*ids, EOS], 2)), "the end-of-text token has one too"
    else:
        used = ids[: end_of(events).usage.completion_tokens]
        assert token_ids == used
        assert logprobs == list(fake_logprobs(used, 2))


def test_prompt_logprobs_are_kept(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, prompt_logprobs=1, max_tokens=0)
    logprobs = (None, *fake_logprobs((6, 7), 1))
    assert generation.push(PromptEvent("r", logprobs)) == []
    assert generation.prompt_logprobs == logprobs
    (end,) = generation.push(FinishEvent("r", FinishReason.LENGTH, Usage(3, 0)))
    assert end == GenerationEnd(FinishReason.LENGTH, Usage(3, 0))


def test_thinking_text_and_calls_with_their_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"Hm.</think>So.\n\n{CALL}")
    close = ids.index(tokenizer.token_id("</think>") or 0)
    events = run(make(tokenizer, parser=OutputParser(True, True), logprobs=0), ids)
    kinds = [type(event) for event in events if getattr(event, "text", "x")]
    assert [k for a, k in zip([None, *kinds], kinds, strict=False) if a is not k] == [
        ReasoningDelta,
        TextDelta,
        ToolCallDelta,
        GenerationEnd,
    ]
    end = end_of(events)
    assert end.reason is FinishReason.TOOL_CALLS
    assert end.reasoning_tokens == close + 1
    # A call has no place for log-probabilities: they come before it, without text.
    with_logprobs = [e for e in events if isinstance(e, TextDelta | ReasoningDelta)]
    assert [p.token_id for e in with_logprobs for p in e.logprobs] == [*ids, EOS]


def test_a_call_that_is_cut_off_is_no_call(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CALL[:-40])
    generation = make(tokenizer, parser=OutputParser(False, True))
    events = run(generation, ids, reason=FinishReason.LENGTH, stop_token=None)
    assert end_of(events).reason is FinishReason.LENGTH
    assert text_of(events) == CALL[:-40]


def test_cut_off_counts_what_there_was(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer)
    generation.push(TokenEvent("r", (40, 41)))
    assert generation.cut_off() == GenerationEnd(FinishReason.ABORT, Usage(3, 2))
    assert generation.push(FinishEvent("r", FinishReason.ABORT, Usage(3, 2))) == []


def test_stop_strings_end_thinking_too(tokenizer: Tokenizer) -> None:
    generation = make(tokenizer, TextOptions(("enough",)), OutputParser(True, False))
    events = run(generation, tokenizer.encode("That is enough, then."))
    thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert thought == "That is "
    assert end_of(events).stop_reason == "enough"
