"""What flows from the engine to whoever asked: plain, frozen records.

The engine emits `TokenEvent`s and one `FinishEvent` per request; the text layer turns them into
`TextDelta`, `ReasoningDelta`, `ToolCallDelta` and a final `GenerationEnd`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. STOP, LENGTH and TOOL_CALLS are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log) of one token and of the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` are prompt tokens that were not recomputed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Sent once, after prefill, when prompt log-probabilities were asked for.

    `logprobs[0]` is None: nothing precedes the first token.
    """

    request_id: str
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Newly generated tokens of one request, in order."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # empty, or one per token


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request. `error` is a sentence when reason is ERROR.

    A token that ended the output is counted in `usage` but comes in no TokenEvent: it is
    `stop_token_id`, with its log-probability beside it where those were asked for.
    """

    request_id: str
    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    error: str | None = None
    stop_logprob: TokenLogprob | None = None


EngineEvent = PromptEvent | TokenEvent | FinishEvent


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of visible text, with the tokens (and their log-probabilities) it came from."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call; `name` is set in the first piece of each call."""

    index: int
    call_id: str
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """The end of a generation. `stop_reason` is the stop string or stop token id that ended it."""

    reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None
    error: str | None = None
    reasoning_tokens: int = field(default=0)


TextEvent = TextDelta | ReasoningDelta | ToolCallDelta | GenerationEnd
