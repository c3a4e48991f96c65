"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metainfer.core.errors import RequestError
from metainfer.core.events import (
    GenerationEnd,
    ReasoningDelta,
    TextDelta,
    TextEvent,
    TokenLogprob,
    ToolCallDelta,
)
from metainfer.llm.dispatch import Call
from metainfer.llm.request import SamplingParams
from metainfer.server.calls import (
    CallId,
    check_text_length,
    open_call,
    read_json,
    usage_record,
)
from metainfer.server.chunks import Chunks, collect
from metainfer.server.logprobs import chat_logprobs
from metainfer.server.schema import ChatBody
from metainfer.server.service import Service
from metainfer.server.sse import EventStream, quote, unless_gone


async def chat_completions(request: Request, service: Service) -> Response:
    """Answer one request. Raises RequestError before anything is sent."""
    body = ChatBody.read(await read_json(request, service.settings.max_body_bytes))
    service.check_model(body.model)
    _check(body)
    check_text_length(service, body.texts(), "messages")
    offers_tools = body.tool_choice != "none"
    prompt = await asyncio.to_thread(service.encode_chat, body, offers_tools)
    max_tokens = body.max_completion_tokens or body.max_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else None

    def sampling(_: int) -> SamplingParams:
        return body.sampling(service.defaults, service.arch.vocab_size, max_tokens, num_top)

    call_id = CallId.new("chatcmpl", service)
    call = open_call(
        service,
        call_id,
        [prompt.token_ids],
        sampling,
        body.n,
        body.text_options(),
        param="messages",
        new_parser=prompt.parser,
        priority=body.priority,
    )
    if body.stream:
        write = ChatChunks(service, body, call_id, call).write
        return EventStream(call, write, service.settings.ping_s)
    try:
        events = await unless_gone(request.receive, collect(call))
        return JSONResponse(_answer(service, body, call_id, call, events))
    finally:
        call.close()


def _check(body: ChatBody) -> None:
    """What pydantic cannot see: fields that depend on each other."""
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            "tool_choice can be auto or none; a call cannot be forced, for want of a grammar",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value"
        )
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(
            "max_tokens and max_completion_tokens differ", param="max_tokens", code="invalid_value"
        )
    if body.max_tokens == 0:
        raise RequestError(
            "max_tokens must be at least 1", param="max_tokens", code="invalid_value"
        )


def _answer(
    service: Service, body: ChatBody, call_id: CallId, call: Call, events: list[list[TextEvent]]
) -> dict[str, Any]:
    return {
        "id": call_id.id,
        "object": "chat.completion",
        "created": call_id.created,
        "model": call_id.model,
        "choices": [_choice(i, found, body, service) for i, found in enumerate(events)],
        "usage": usage_record(call, body.n),
    }


def _choice(
    index: int, events: Sequence[TextEvent], body: ChatBody, service: Service
) -> dict[str, Any]:
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta)) or None
    calls = [e for e in events if isinstance(e, ToolCallDelta)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    end = events[-1]
    assert isinstance(end, GenerationEnd), "a generation ends with its end"
    logprobs: list[TokenLogprob] = []
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta):
            logprobs += event.logprobs
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(logprobs, body.top_logprobs or 0, service.tokenizer)
        if body.logprobs
        else None,
        "finish_reason": end.reason.value,
        "stop_reason": end.stop_reason,
    }


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class ChatChunks(Chunks):
    """Writes the chunks of a streamed chat."""

    def __init__(self, service: Service, body: ChatBody, call_id: CallId, call: Call) -> None:
        super().__init__("chat.completion.chunk", call_id, call, body.n, body.stream_options)
        self._tokenizer = service.tokenizer
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None

    def begin(self, index: int) -> Iterator[bytes]:
        yield self._delta(index, '{"role":"assistant","content":""}')

    def piece(self, index: int, event: TextEvent) -> Iterator[bytes]:
        match event:
            case TextDelta():
                yield self._delta(index, f'{{"content":{quote(event.text)}}}', event.logprobs)
            case ReasoningDelta():
                text = quote(event.text)
                delta = f'{{"reasoning":{text},"reasoning_content":{text}}}'
                yield self._delta(index, delta, event.logprobs)
            case ToolCallDelta():
                record = {"index": event.index, **_tool_call(event)}
                yield self._delta(index, quote({"tool_calls": [record]}))
            case GenerationEnd():
                yield self._delta(index, "{}", (), event)

    def _delta(
        self,
        index: int,
        delta: str,
        logprobs: Sequence[TokenLogprob] = (),
        end: GenerationEnd | None = None,
    ) -> bytes:
        shown = "null"
        if logprobs and self._num_top is not None:
            shown = quote(chat_logprobs(logprobs, self._num_top, self._tokenizer))
        return self.chunk(index, f'"delta":{delta},"logprobs":{shown}', end)
