"""POST /v1/completions: text without a chat format, with echo and log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metainfer.core.errors import RequestError
from metainfer.core.events import GenerationEnd, TextDelta, TextEvent
from metainfer.llm.dispatch import Call
from metainfer.llm.request import SamplingParams
from metainfer.server.calls import (
    CallId,
    check_choices,
    check_text_length,
    open_call,
    read_json,
    usage_record,
)
from metainfer.server.chunks import Chunks, collect
from metainfer.server.logprobs import CompletionLogprobs, joined
from metainfer.server.schema import CompletionBody, check_token_id
from metainfer.server.service import Service
from metainfer.server.sse import EventStream, quote, unless_gone

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and vLLM's, for this endpoint."""


async def completions(request: Request, service: Service) -> Response:
    """Answer one request. Raises RequestError before anything is sent."""
    body = CompletionBody.read(await read_json(request, service.settings.max_body_bytes))
    service.check_model(body.model)
    prompts = read_prompts(body.prompt, service.arch.vocab_size)
    check_choices(service, len(prompts) * body.n)
    for prompt in prompts:
        check_text_length(service, [prompt] if isinstance(prompt, str) else (), "prompt")
    token_ids = await asyncio.to_thread(_encode_all, service, prompts, body.add_special_tokens)

    def sampling(prompt_tokens: int) -> SamplingParams:
        max_tokens = body.max_tokens
        if max_tokens is None:
            max_tokens = max(min(DEFAULT_MAX_TOKENS, service.max_model_len - prompt_tokens), 1)
        return body.sampling(
            service.defaults,
            service.arch.vocab_size,
            max_tokens,
            body.logprobs,
            body.logprobs if body.echo else None,
        )

    call_id = CallId.new("cmpl", service)
    call = open_call(
        service,
        call_id,
        token_ids,
        sampling,
        body.n,
        body.text_options(),
        param="prompt",
        priority=body.priority,
    )
    choices = [
        Choice(index, prompts[index // body.n], body, call, service)
        for index in range(len(call.generations))
    ]
    if body.stream:
        write = CompletionChunks(body, call_id, call, choices).write
        return EventStream(call, write, service.settings.ping_s)
    try:
        events = await unless_gone(request.receive, collect(call))
        return JSONResponse(_answer(body, call_id, call, choices, events))
    finally:
        call.close()


def read_prompts(prompt: Any, vocab_size: int) -> list[str | list[int]]:
    """The four forms of `prompt`: a text, texts, token ids, lists of token ids.

    Written by hand, since a prompt may be a million ids and pydantic would try each form on each.
    """
    items = prompt if isinstance(prompt, list) else [prompt]
    if not items:
        raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
    if all(type(item) is str for item in items):
        return items
    if all(type(item) is int for item in items):
        items = [items]
    for item in items:
        if type(item) is not list or not all(type(token_id) is int for token_id in item):
            raise RequestError(
                "prompt must be a string, a list of strings, a list of token ids or a list of "
                "lists of token ids",
                param="prompt",
                code="invalid_type",
            )
        for token_id in (min(item, default=0), max(item, default=0)):
            check_token_id(token_id, vocab_size, "prompt")
    return items


def _encode_all(
    service: Service, prompts: Sequence[str | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    return [
        service.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


class Choice:
    """One choice as it grows: its echoed prompt, its text, its log-probabilities."""

    def __init__(
        self,
        index: int,
        prompt: str | list[int],
        body: CompletionBody,
        call: Call,
        service: Service,
    ) -> None:
        self.index = index
        self._prompt = prompt
        self._body = body
        self._generation = call.generations[index]
        self._tokenizer = service.tokenizer
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                body.logprobs, service.tokenizer, body.skip_special_tokens
            )

    def echo(self) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of the prompt; asked for once, when prefill is through."""
        prompt, logprobs = self._prompt, None
        if self._logprobs is not None:
            logprobs = self._logprobs.prompt(
                self._generation.request.prompt_token_ids, self._generation.prompt_logprobs
            )
        if isinstance(prompt, str):
            return prompt, logprobs
        return self._tokenizer.decode(prompt, self._body.skip_special_tokens), logprobs

    def piece(self, event: TextDelta) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of one event."""
        if self._logprobs is None:
            return event.text, None
        return event.text, self._logprobs.generated(event.logprobs)


def _answer(
    body: CompletionBody,
    call_id: CallId,
    call: Call,
    choices: Sequence[Choice],
    events: Sequence[Sequence[TextEvent]],
) -> dict[str, Any]:
    records = []
    for choice, found in zip(choices, events, strict=True):
        pieces = [choice.echo()] if body.echo else []
        pieces += [choice.piece(event) for event in found if isinstance(event, TextDelta)]
        end = found[-1]
        assert isinstance(end, GenerationEnd), "a generation ends with its end"
        logprobs = [logprobs for _, logprobs in pieces if logprobs is not None]
        records.append(
            {
                "index": choice.index,
                "text": "".join(text for text, _ in pieces),
                "logprobs": None if body.logprobs is None else joined(logprobs),
                "finish_reason": end.reason.value,
                "stop_reason": end.stop_reason,
            }
        )
    return {
        "id": call_id.id,
        "object": "text_completion",
        "created": call_id.created,
        "model": call_id.model,
        "choices": records,
        "usage": usage_record(call, body.n),
    }


class CompletionChunks(Chunks):
    """Writes the chunks of a streamed completion."""

    def __init__(
        self, body: CompletionBody, call_id: CallId, call: Call, choices: Sequence[Choice]
    ) -> None:
        super().__init__("text_completion", call_id, call, body.n, body.stream_options)
        self._choices = choices
        self._echo = body.echo

    def begin(self, index: int) -> Iterator[bytes]:
        if self._echo:
            yield self._text(index, *self._choices[index].echo())

    def piece(self, index: int, event: TextEvent) -> Iterator[bytes]:
        match event:
            case TextDelta():
                yield self._text(index, *self._choices[index].piece(event))
            case GenerationEnd():
                yield self._text(index, "", None, event)

    def _text(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        end: GenerationEnd | None = None,
    ) -> bytes:
        return self.chunk(index, f'"text":{quote(text)},"logprobs":{quote(logprobs)}', end)
