"""`metainfer run` and `chat` over a miniature checkpoint: answers, and sentences for bad input."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest

from metainfer.cli.chat import ChatOptions, Conversation
from metainfer.cli.sampling import SamplingOptions
from metainfer.cli.session import Session
from metainfer.cli.terminal import Terminal
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.command import metainfer
from tests.fakes.tiny_tokenizer import write_tokenizer

CTRL_C = "^C"
ONE_THREAD = ("--threads", "1", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("run") / "tiny"))


def say(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Put `said` on stdin."""
    stdin = io.TextIOWrapper(io.BytesIO(said), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)


def test_an_answer_as_json_and_as_text(model: str) -> None:
    flags = (*ONE_THREAD, "--prompt", "The wind", "--max-tokens", "12", "--seed", "5")
    as_json = metainfer("run", model, *flags, "--json")
    assert as_json.code == 0, as_json.err
    answer = json.loads(as_json.out)
    assert answer["finish_reason"] in ("length", "stop")
    assert 0 < answer["usage"]["completion_tokens"] <= 12
    assert answer["time_to_first_token_s"] <= answer["elapsed_s"]
    as_text = metainfer("run", model, *flags)
    assert (as_text.code, as_text.out) == (0, answer["text"] + "\n")
    assert f"ended by {answer['finish_reason']}" in as_text.err
    other = metainfer("run", model, *flags, "--raw")
    assert other.out != as_text.out, "without the chat format it is another prompt"


def test_a_stop_string_ends_an_answer(model: str) -> None:
    flags = (*ONE_THREAD, "--raw", "--prompt", "The wind", "--max-tokens", "20", "--seed", "5")
    whole = metainfer("run", model, *flags).out[:-1]
    stop = whole[6:8]
    assert metainfer("run", model, *flags, "--stop", stop).out[:-1] == whole[: whole.find(stop)]


@pytest.mark.parametrize(
    ("flags", "said", "sentence"),
    [
        ((), b"", "--prompt is not given"),
        (("--prompt", " "), b"", "the prompt is empty"),
        (("--prompt", "-"), b"", "the prompt is empty"),
        (("--prompt", "-"), b"ab\xff", "stdin is not UTF-8: byte 2"),
        (("--prompt", "a\udcff"), b"", "--prompt is not UTF-8"),
        (("--prompt", "x", "--temperature", "-1"), b"", "--temperature must be between 0 and 100"),
        (("--prompt", "x", "--max-tokens", "0"), b"", "--max-tokens must be at least 1"),
        (("--prompt", "-"), b"dog " * 5000, "the longest sequence"),
        (("--prompt", "x", "--max-model-len", "99999"), b"", "more than the 4096 tokens"),
    ],
)
def test_what_cannot_be_answered(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    said: bytes,
    sentence: str,
) -> None:
    say(monkeypatch, said)
    ran = metainfer("run", model, *ONE_THREAD, *flags)
    assert (ran.code, ran.out) == (2, "")
    assert "error: " in ran.err and sentence in ran.err


def test_stdin_that_was_closed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for verb in (("run", "--prompt", "-"), ("chat",)):
        ran = metainfer(*verb, model)
        assert ran.code == 2 and "closed" in ran.err


def test_a_model_whose_text_side_does_not_fit(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "tiny")
    run = ("run", str(directory), "--prompt", "x")
    defaults = directory / "generation_config.json"
    defaults.write_text('{"temperature": -3}')
    ran = metainfer(*run)
    assert ran.code == 2
    assert f"{defaults}: temperature must be between 0 and 100" in ran.err
    write_tokenizer(directory, 600)
    ran = metainfer(*run)
    assert ran.code == 2 and "has 600 tokens, but the model has 512" in ran.err
    (directory / "tokenizer.json").unlink()
    ran = metainfer(*run)
    assert ran.code == 2 and "tokenizer.json is missing" in ran.err


def test_a_conversation(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = b"dog " * 5000
    say(monkeypatch, b"Hello\n/nope\n" + too_long + b"\na\xff\n\n/reset\nHello\n/quit\nnot said\n")
    ran = metainfer("chat", model, *ONE_THREAD, "--max-tokens", "6", "--temperature", "0")
    assert ran.code == 0, ran.err
    assert "there is no /nope" in ran.err and "forgotten" in ran.err
    assert "the longest sequence" in ran.err and "not valid Unicode" in ran.err
    first, rest = ran.out[: len(ran.out) // 2], ran.out[len(ran.out) // 2 :]
    assert first == rest and first.strip(), "forgotten, the same is answered again"


def test_a_conversation_with_nobody(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, b"")
    ran = metainfer("chat", model, *ONE_THREAD)
    assert (ran.code, ran.out) == (0, "")


def test_only_two_interruptions_with_nothing_said_between_end_a_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C at the prompt, then in an answer: what was said between them keeps it going."""
    terminal = Terminal(io.StringIO(), io.StringIO(), colour=False, live=False)
    heard: list[str] = []

    def read(_: TextIO) -> str:
        event = events.pop(0)
        if event == CTRL_C:
            raise KeyboardInterrupt
        return event

    def take(line: str) -> bool:
        heard.append(line)
        if line == "long":
            raise KeyboardInterrupt
        return line != "/quit"

    conversation = Conversation(
        terminal, cast("Session", None), ChatOptions(None, None, None), SamplingOptions()
    )
    monkeypatch.setattr(conversation, "_read", read)
    monkeypatch.setattr(conversation, "take", take)
    events = [CTRL_C, "long", "short", CTRL_C, "long", "/quit"]
    conversation.hold(sys.stdin)
    assert heard == ["long", "short", "long", "/quit"]
    events = ["long", CTRL_C, "never"]
    with pytest.raises(KeyboardInterrupt):
        conversation.hold(sys.stdin)
    assert events == ["never"]
