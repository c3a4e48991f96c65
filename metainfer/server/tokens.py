"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metainfer.core.errors import RequestError
from metainfer.server.calls import read_json
from metainfer.server.schema import DetokenizeBody, TokenizeBody, check_token_id
from metainfer.server.service import Service


async def tokenize(request: Request, service: Service) -> Response:
    """Token ids of a text, or of a conversation as the model would read it."""
    body = TokenizeBody.read(await read_json(request, service.settings.max_body_bytes))
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
    tokens = await asyncio.to_thread(_encode, service, body)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in tokens]
    return JSONResponse(answer)


async def detokenize(request: Request, service: Service) -> Response:
    """Text of token ids, special tokens included."""
    body = DetokenizeBody.read(await read_json(request, service.settings.max_body_bytes))
    service.check_model(body.model)
    if body.tokens:
        check_token_id(max(body.tokens), service.arch.vocab_size, "tokens")
    prompt = await asyncio.to_thread(service.tokenizer.decode, body.tokens, False)
    return JSONResponse({"prompt": prompt})


def _encode(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is None:
        return service.tokenizer.encode(body.prompt or "", body.add_special_tokens)
    return list(service.encode_chat(body).token_ids)
