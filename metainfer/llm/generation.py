"""From engine events to text events: decoding, stop strings and output parser of one request.

`dispatch.py` brings the events here and hands the text on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metainfer.core.events import (
    EngineEvent,
    FinishEvent,
    FinishReason,
    GenerationEnd,
    PromptEvent,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    TokenEvent,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from metainfer.llm.request import Request
from metainfer.text.parse import OutputParser
from metainfer.text.stop import StopMatcher
from metainfer.text.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the tokens of one request become text.

    Attributes:
        stop: texts that end the output, in thinking as well; as with stop tokens, the request's
            `min_tokens` come first, and text of those tokens is not searched.
        include_stop: the stop string, or the text of the stop token, is part of the output.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


class Generation:
    """Turns the engine's events of one request into text events.

    Args:
        request: what was asked of the engine.
        eos_token_ids: the model's end-of-text tokens: ending with one is no `stop_reason`.
        parser: splits thinking and tool calls off; None leaves all as text.

    Attributes:
        prompt_logprobs: set before the first text event, if the request asked for them.
        num_tokens: tokens of the output so far; one that ends it is counted in the end's usage.
        stopped: a stop string was found: the engine should abort the request.
        end: the last event, once it was given out.
        first_token_s, last_token_s: `time.monotonic()` of tokens, None before the first.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        options: TextOptions = TextOptions(),
        parser: OutputParser | None = None,
    ) -> None:
        self.request = request
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.end: GenerationEnd | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._eos = frozenset(eos_token_ids)
        self._min_tokens = request.sampling.min_tokens
        self._include_stop = options.include_stop
        self._decoder = IncrementalDecoder(tokenizer, options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop, options.include_stop)
        self._parser = parser
        # Tokens whose text is still held back; they go out with the next piece of text.
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    def push(self, event: EngineEvent) -> list[TextEvent]:
        """The text events that follow from one engine event; empty after the end."""
        if self.end is not None:
            return []
        match event:
            case PromptEvent():
                self.prompt_logprobs = event.logprobs
                return []
            case TokenEvent():
                return self._push_tokens(event)
            case FinishEvent():
                return self._finish(event)

    def cut_off(self) -> GenerationEnd:
        """The end of a generation that nobody waits for any longer."""
        usage = Usage(len(self.request.prompt_token_ids), self.num_tokens)
        self.end = GenerationEnd(FinishReason.ABORT, usage)
        return self.end

    def _push_tokens(self, event: TokenEvent) -> list[TextEvent]:
        out: list[TextEvent] = []
        for position, token_id in enumerate(event.token_ids):
            if self.stopped:
                break
            self.num_tokens += 1
            if self._parser is not None and self._parser.is_thinking:
                self.num_reasoning_tokens += 1
            self._token_ids.append(token_id)
            self._logprobs += event.logprobs[position : position + 1]
            text = self._decoder.push(token_id)
            searched = self.num_tokens > self._min_tokens
            out += self._parse(self._matcher.push(text) if searched else text)
        return out

    def _finish(self, event: FinishEvent) -> list[TextEvent]:
        out: list[TextEvent] = []
        if not self.stopped:
            if event.stop_logprob is not None:
                self._logprobs.append(event.stop_logprob)
            tail = ""
            if self._include_stop and event.stop_token_id is not None:
                tail = self._decoder.push(event.stop_token_id)
            tail = self._matcher.push(tail + self._decoder.finish())
            out += self._parse(tail + self._matcher.finish())
        if self._parser is not None:
            out += self._with_tokens(self._parser.finish())
        if self._logprobs:
            out += self._with_tokens([TextDelta("")])
        self.end = self._end_of(event)
        return [*out, self.end]

    def _end_of(self, event: FinishEvent) -> GenerationEnd:
        reason, usage = event.reason, event.usage
        stop_reason: str | int | None = None
        if self._matcher.matched is not None and reason is not FinishReason.ERROR:
            # The engine ran on until it heard of the stop: those tokens are not the client's.
            reason, stop_reason = FinishReason.STOP, self._matcher.matched
            usage = replace(usage, completion_tokens=self.num_tokens)
        elif reason is FinishReason.STOP and event.stop_token_id not in self._eos:
            stop_reason = event.stop_token_id
        called = self._parser is not None and self._parser.num_calls > 0
        if reason is FinishReason.STOP and called:
            reason = FinishReason.TOOL_CALLS
        return GenerationEnd(reason, usage, stop_reason, event.error, self.num_reasoning_tokens)

    def _parse(self, text: str) -> list[TextEvent]:
        if not text:
            return []
        return self._with_tokens(
            [TextDelta(text)] if self._parser is None else self._parser.feed(text)
        )

    def _with_tokens(
        self, deltas: Sequence[TextDelta | ReasoningDelta | ToolCallDelta]
    ) -> list[TextEvent]:
        """Attach the tokens not given out yet to the first piece of text. Before a tool call,
        which has no place for them, log-probabilities get an empty piece of their own."""
        out: list[TextEvent] = []
        for delta in deltas:
            if not isinstance(delta, ToolCallDelta):
                out.append(
                    replace(delta, token_ids=tuple(self._token_ids), logprobs=tuple(self._logprobs))
                )
            elif self._logprobs:
                out.append(TextDelta("", tuple(self._token_ids), tuple(self._logprobs)))
                out.append(delta)
            else:
                out.append(delta)
            self._token_ids.clear()
            self._logprobs.clear()
        return out
