"""`metainfer run`: the answer to one prompt, streamed to stdout."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metainfer.cli.sampling import MODEL_HELP, SamplingOptions
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.core.events import GenerationEnd, ReasoningDelta, TextDelta, TextEvent
from metainfer.core.units import format_seconds
from metainfer.plan.settings import EngineSettings

if TYPE_CHECKING:
    from metainfer.cli.session import Session
    from metainfer.text.chat import ChatPrompt

STDIN = "-"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is asked."""

    model: str | None = flag("MODEL", MODEL_HELP, aliases=("--model", "--model-path"))
    prompt: str | None = flag("--prompt", "The prompt; - reads it from stdin", aliases=("-p",))
    system: str | None = flag("--system", "What the model is told before the prompt")
    raw: bool = flag("--raw", "Continue the prompt as plain text, without the chat format", False)
    thinking: bool | None = flag("--thinking", "Let the model think first; the model's own default")
    json: bool = flag("--json", "Print the answer, its usage and times as JSON", False)

    def __post_init__(self) -> None:
        for name, given in (("--system", self.system), ("--thinking", self.thinking)):
            if self.raw and given is not None:
                raise UserError(f"{name} belongs to the chat format, which --raw leaves out")


@dataclass(slots=True)
class Answer:
    """One answer as it grows. Times are seconds since it was asked for."""

    began_s: float = field(default_factory=time.monotonic)
    text: str = ""
    reasoning: str = ""
    end: GenerationEnd | None = None
    first_s: float | None = None

    def take(self, event: TextEvent) -> None:
        match event:
            case TextDelta(text):
                self.text += text
            case ReasoningDelta(text):
                self.reasoning += text
            case GenerationEnd():
                self.end = event
        if self.first_s is None and not isinstance(event, GenerationEnd):
            self.first_s = time.monotonic() - self.began_s

    def summary(self) -> str:
        """One line on lengths and times."""
        assert self.end is not None, "the answer has ended"
        elapsed_s = time.monotonic() - self.began_s
        usage, first_s = self.end.usage, self.first_s or elapsed_s
        parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"]
        parts += [
            f"first after {format_seconds(first_s)}",
            f"all after {format_seconds(elapsed_s)}",
        ]
        if usage.completion_tokens > 1 and elapsed_s > first_s:
            parts.append(f"{(usage.completion_tokens - 1) / (elapsed_s - first_s):.1f} tokens/s")
        return ", ".join([*parts, f"ended by {self.end.reason.value}"])

    def to_json(self) -> dict[str, Any]:
        assert self.end is not None, "the answer has ended"
        usage = self.end.usage
        return {
            "text": self.text,
            "reasoning": self.reasoning or None,
            "finish_reason": self.end.reason.value,
            "stop_reason": self.end.stop_reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "reasoning_tokens": self.end.reasoning_tokens,
            },
            "time_to_first_token_s": self.first_s,
            "elapsed_s": time.monotonic() - self.began_s,
        }


def run(
    terminal: Terminal, options: RunOptions, sampling: SamplingOptions, settings: EngineSettings
) -> int:
    prompt = read_prompt(options.prompt)

    from metainfer.cli.session import open_session

    with open_session(terminal, options.model, settings) as session:
        answer = ask(terminal, session, prompt, options, sampling)
    if options.json:
        terminal.data(json.dumps(answer.to_json(), indent=2, ensure_ascii=False))
    else:
        terminal.data("")
        terminal.say(terminal.dim(answer.summary()))
    return 0


def ask(
    terminal: Terminal,
    session: Session,
    prompt: str,
    options: RunOptions,
    sampling: SamplingOptions,
) -> Answer:
    """The answer; unless it is wanted as JSON, it is also written as it comes."""
    asked: ChatPrompt | list[int]
    if options.raw:
        asked = session.tokenizer.encode(prompt)
    else:
        messages = [{"role": "user", "content": prompt}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        asked = session.chat_prompt(messages, options.thinking)
    answer = Answer()
    with closing(session.answer(asked, sampling)) as events:
        for event in events:
            answer.take(event)
            if not options.json:
                show(terminal, event)
    return answer


def show(terminal: Terminal, event: TextEvent) -> None:
    """Text to stdout; thinking, which is not the answer, to stderr."""
    match event:
        case TextDelta(text):
            terminal.data(text, end="")
        case ReasoningDelta(text):
            terminal.err.write(terminal.dim(text))
            terminal.err.flush()


def read_prompt(given: str | None) -> str:
    """The prompt that was given, or stdin's. Raises UserError if there is none."""
    if given is None:
        raise UserError("--prompt is not given", hint="--prompt - reads it from stdin")
    if given != STDIN:
        text = given
        if _has_surrogates(text):
            raise UserError("--prompt is not UTF-8")
    elif sys.stdin is None:
        raise UserError("--prompt - reads stdin, which is closed")
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"stdin is not UTF-8: byte {error.start}: {error.reason}") from error
    if not text.strip():
        raise UserError("the prompt is empty", hint="give some text with --prompt")
    return text


def _has_surrogates(text: str) -> bool:
    """Whether `text` came from bytes that are not UTF-8: Python spells those as surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in text)


VERB = Verb(
    "run",
    "Answer one prompt and stop",
    (("what is asked", RunOptions), ("sampling", SamplingOptions), ("engine", EngineSettings)),
    run,
    (
        'metainfer run --prompt "How do I bake bread?"',
        'metainfer run /data/model --raw --prompt "Once upon a time" --max-tokens 64',
        "metainfer run --prompt - --json < question.txt",
    ),
)
