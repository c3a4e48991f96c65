"""Around every request: an id, the key, a line in the log, and no exception without an answer."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metainfer.core.errors import RequestError
from metainfer.server.errors import error_response
from metainfer.server.service import Service
from metainfer.server.sse import ClientGone

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What load balancers ask without a key."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_CLIENT_GONE_STATUS = 499  # nginx's number; only the log and the metrics see it


class Guard:
    """ASGI middleware. Bodies, prompts and keys are never logged."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        keys = service.settings.api_keys
        self._keys = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        answer = _Answer(send, request_id)
        started_s = time.monotonic()
        try:
            if scope["path"] in OPEN_PATHS or self._has_key(headers):
                await self._app(scope, receive, answer.send)
            else:
                await self._refuse(scope, receive, answer)
        except ClientGone:
            answer.status = _CLIENT_GONE_STATUS
        except Exception:
            logger.exception("request %s failed", request_id)
            answer.status = answer.status or 500
            await self._apologise(scope, receive, answer)
        finally:
            seconds = time.monotonic() - started_s
            self._record(scope, request_id, answer.status or _CLIENT_GONE_STATUS, seconds)

    def _has_key(self, headers: Headers) -> bool:
        if not self._keys:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        # All keys are compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(digest, known) for known in self._keys) > 0

    async def _refuse(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        error = RequestError(
            "The API key is missing or wrong",
            code="invalid_api_key",
            status=401,
            hint="Send it as `Authorization: Bearer KEY`.",
        )
        await error_response(error, self._service.settings)(scope, receive, answer.send)

    async def _apologise(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if answer.started:
            return  # too late: the connection is cut, which the client sees as an error
        error = RequestError(
            "the server made a mistake",
            code="internal_error",
            status=500,
            hint=f"Its log says more under request id {answer.request_id}.",
        )
        await error_response(error, self._service.settings)(scope, receive, answer.send)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        # A client may spell any method: each would be a series that is kept for ever.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._service.metrics.on_answer(method, path, status)
        logger.info("%s %s %s %d %.3fs", request_id, method, path, status, seconds)


class _Answer:
    """Passes an answer on, with the request id in its headers, and remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self.request_id
        await self._send(message)


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing them does not tell their length."""
    return hashlib.sha256(key).digest()
