"""The HTTP application: which path leads where. Every handler gets the request and the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import metainfer
from metainfer.arch.record import Arch
from metainfer.core.errors import UserError
from metainfer.llm.client import EngineClient
from metainfer.plan.plan import Plan
from metainfer.server import health
from metainfer.server.chat import chat_completions
from metainfer.server.completions import completions
from metainfer.server.errors import error_response, http_error
from metainfer.server.guard import Guard
from metainfer.server.metrics import Metrics
from metainfer.server.schema import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from metainfer.server.service import Service
from metainfer.server.settings import ServerSettings
from metainfer.server.tokens import detokenize, tokenize
from metainfer.text.chat import ChatEncoder
from metainfer.text.generation_config import GenerationConfig
from metainfer.text.tokenizer import Tokenizer

Handler = Callable[[Request, Service], Awaitable[Response]]

READ_ROUTES: tuple[tuple[str, Handler], ...] = (
    ("/health", health.health),
    ("/ready", health.ready),
    ("/version", health.version),
    ("/plan", health.plan),
    ("/metrics", health.metrics),
    ("/v1/models", health.models),
    ("/v1/models/{name:path}", health.model),
)

BODY_ROUTES: tuple[tuple[str, Handler, type[Body]], ...] = (
    ("/v1/chat/completions", chat_completions, ChatBody),
    ("/v1/completions", completions, CompletionBody),
    ("/tokenize", tokenize, TokenizeBody),
    ("/v1/tokenize", tokenize, TokenizeBody),
    ("/detokenize", detokenize, DetokenizeBody),
    ("/v1/detokenize", detokenize, DetokenizeBody),
)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    arch: Arch,
    *,
    model_names: Sequence[str],
    settings: ServerSettings | None = None,
    defaults: GenerationConfig | None = None,
    plan: Plan | None = None,
    ready: bool = True,
) -> FastAPI:
    """The application over one engine. `app.state.service` is its `Service`.

    Args:
        model_names: names that clients may ask for, at least one; answers carry the first.
        defaults: sampling and thinking where a request does not say.
        plan: shown at /plan; it also bounds the context, which else is the model's own.
        ready: False until `app.state.service.ready` is set.

    Raises UserError if the tokenizer does not fit the model.
    """
    defaults = defaults or GenerationConfig()
    tokenizer.check_fits(arch.vocab_size, arch.bos_token_id, arch.eos_token_ids)
    chat: ChatEncoder | UserError
    try:
        chat = ChatEncoder(tokenizer, defaults.thinking)
    except UserError as error:
        chat = error  # text completions still work; chats get this sentence
    service = Service(
        client=client,
        tokenizer=tokenizer,
        arch=arch,
        model_names=tuple(model_names),
        max_model_len=arch.max_model_len if plan is None else plan.max_model_len.value,
        settings=settings or ServerSettings(),
        defaults=defaults,
        chat=chat,
        metrics=Metrics(model_names[0], client.stats),
        plan=plan,
        ready=ready,
    )
    return _application(service)


def _application(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    async def on_user_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, UserError), "registered for UserError"
        return error_response(error, service.settings)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException"
        return error_response(http_error(error), service.settings, error.headers)

    app = FastAPI(
        title="metainfer",
        version=metainfer.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        exception_handlers={UserError: on_user_error, HTTPException: on_http_error},
    )
    app.state.service = service
    for path, handler in READ_ROUTES:
        _add(app, service, path, handler, ["GET", "HEAD"])
    for path, handler, body in BODY_ROUTES:
        _add(app, service, path, handler, ["POST"], body)
    app.add_middleware(Guard, service=service)
    if service.settings.cors_origins:  # outermost: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _add(
    app: FastAPI,
    service: Service,
    path: str,
    handler: Handler,
    methods: list[str],
    body: type[Body] | None = None,
) -> None:
    """Bodies are read and checked by the handlers, within limits that FastAPI has no notion of;
    here they are only described."""

    async def endpoint(request: Request) -> Response:
        return await handler(request, service)

    described: dict[str, Any] = {}
    if body is not None:
        content = {"application/json": {"schema": body.model_json_schema()}}
        described = {"requestBody": {"content": content, "required": True}}
    app.add_api_route(
        path,
        endpoint,
        methods=methods,
        name=handler.__name__,
        description=handler.__doc__,
        operation_id=None,
        response_model=None,
        openapi_extra=described,
    )
