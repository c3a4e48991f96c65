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
    return JSONResponse(await asyncio.to_thread(_tokenized, service, body))


async def detokenize(request: Request, service: Service) -> Response:
    """Text of token ids, special tokens included."""
    body = DetokenizeBody.read(await read_json(request, service.settings.max_body_bytes))
    service.check_model(body.model)
    if body.tokens:
        check_token_id(max(body.tokens), service.arch.vocab_size, "tokens")
    prompt = await asyncio.to_thread(service.tokenizer.decode, body.tokens, False)
    return JSONResponse({"prompt": prompt})


def _tokenized(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """The answer. Seconds for the longest texts: call it in a thread."""
    if body.messages is None:
        tokens = service.tokenizer.encode(body.prompt or "", body.add_special_tokens)
    else:
        tokens = list(service.encode_chat(body).token_ids)
    texts = map(service.tokenizer.token_text, tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.max_model_len,
        "tokens": tokens,
        "token_strs": None if texts is None else list(texts),
    }
