"""From an HTTP request to an open call on the engine, and what all answers have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from metainfer.core.errors import RequestError
from metainfer.llm.dispatch import Call
from metainfer.llm.generation import Generation, TextOptions
from metainfer.llm.request import Request, SamplingParams
from metainfer.server.service import Service
from metainfer.server.sse import ClientGone
from metainfer.text.parse import OutputParser


@dataclass(frozen=True, slots=True)
class CallId:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, service: Service) -> CallId:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), service.model_names[0])


async def read_json(request: HttpRequest, max_bytes: int) -> Any:
    """The request's body, never holding more than `max_bytes` of it.

    Raises RequestError: 413 when it is longer, 400 when it is not UTF-8 JSON (nesting beyond 200
    levels counts as such). Raises ClientGone when the client hangs up before the end.
    """
    pieces, size = [], 0
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        size = int(announced)
    else:
        try:
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    break
                pieces.append(piece)
        except ClientDisconnect:
            raise ClientGone from None
    if size > max_bytes:
        raise RequestError(
            f"the body is longer than {max_bytes} bytes", code="body_too_large", status=413
        )
    try:
        return from_json(b"".join(pieces), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def check_text_length(service: Service, texts: Iterable[str], param: str) -> None:
    """Raises RequestError for texts that cannot fit the context together, before anybody spends
    seconds on encoding them."""
    tokens = sum(map(service.tokenizer.least_tokens, texts))
    if tokens > service.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {service.max_model_len} tokens. However, your "
            f"prompt has at least {tokens} tokens",
            param=param,
            code="context_length_exceeded",
            hint="Please reduce the length of the prompt.",
        )


def check_length(
    prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str
) -> None:
    """Raises RequestError for an empty prompt and for one that leaves no room for the answer."""
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty", param=param, code="empty_prompt")
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_tokens + wanted > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} "
            "in the completion)",
            param=param,
            code="context_length_exceeded",
            hint="Please reduce the length of the prompt or the completion.",
        )


def check_choices(service: Service, choices: int) -> None:
    """Raises RequestError for a call of too many choices."""
    if choices > service.settings.max_choices:
        raise RequestError(
            f"prompts times n is {choices}, the most is {service.settings.max_choices}",
            param="n",
            code="invalid_value",
        )


def open_call(
    service: Service,
    call_id: CallId,
    prompts: Sequence[Sequence[int]],
    sampling: Callable[[int], SamplingParams],
    n: int,
    options: TextOptions,
    *,
    param: str,
    new_parser: Callable[[], OutputParser] | None = None,
    priority: int = 0,
) -> Call:
    """Queue `n` requests for each prompt; choice i of prompt p has index p * n + i.

    Args:
        sampling: parameters for a prompt of that many tokens. Choices after the first get seeds
            that count up, so that they differ and can still be repeated.
        param: the field that the prompts came from, for errors.

    Raises RequestError if one of them cannot be served; then none is.
    """
    if not service.ready:
        raise RequestError("the server is not ready", code="not_ready", status=503)
    check_choices(service, len(prompts) * n)
    generations: list[Generation] = []
    arrival_s = time.monotonic()
    for prompt in prompts:
        params = sampling(len(prompt))
        check_length(len(prompt), params.max_tokens, service.max_model_len, param)
        for choice in range(n):
            seed = None if params.seed is None else params.seed + choice
            request = Request(
                request_id=f"{call_id.id}-{len(generations)}",
                prompt_token_ids=tuple(prompt),
                sampling=replace(params, seed=seed),
                arrival_s=arrival_s,
                priority=priority,
            )
            parser = new_parser() if new_parser is not None else None
            generations.append(
                Generation(request, service.tokenizer, service.arch.eos_token_ids, options, parser)
            )
    call = Call(service.dispatcher, generations, service.metrics)
    call.open_async()
    return call


def usage_record(call: Call, n: int) -> dict[str, Any]:
    """`usage` of an answer, or of as much of it as there is. A prompt counts once for its `n`
    choices."""
    firsts = call.generations[::n]
    prompt_tokens = sum(len(g.request.prompt_token_ids) for g in firsts)
    completion_tokens = sum(
        g.num_tokens if g.end is None else g.end.usage.completion_tokens for g in call.generations
    )
    cached = sum(g.end.usage.cached_tokens for g in firsts if g.end is not None)
    reasoning = sum(g.num_reasoning_tokens for g in call.generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
