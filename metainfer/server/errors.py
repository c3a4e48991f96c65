"""Errors as OpenAI's API words them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from metainfer.core.errors import RequestError, UserError
from metainfer.core.events import GenerationEnd
from metainfer.server.settings import ServerSettings

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_BUSY = (429, 503)


def error_record(error: UserError) -> dict[str, Any]:
    """The JSON object for one error."""
    refused = error if isinstance(error, RequestError) else RequestError(error.message)
    kind = _TYPES.get(
        refused.status, "invalid_request_error" if refused.status < 500 else "server_error"
    )
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    return {
        "error": {"message": message, "type": kind, "param": refused.param, "code": refused.code}
    }


def error_response(
    error: UserError, settings: ServerSettings, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The whole answer; those turned away for load are told when to come back."""
    status = error.status if isinstance(error, RequestError) else 400
    headers = dict(headers or {})
    if status in _BUSY:
        headers["Retry-After"] = str(settings.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_record(error), status, headers)


def http_error(exception: HTTPException) -> RequestError:
    """What the router refuses (404, 405), in the same words as everything else."""
    return RequestError(str(exception.detail), code="route_error", status=exception.status_code)


def failed(end: GenerationEnd) -> RequestError:
    """A generation that ended without being finished, as an error of its call."""
    message = end.error or "the request was ended by the server"
    return RequestError(message, code="generation_failed", status=500 if end.error else 503)


def error_frame(error: UserError) -> bytes:
    """An error in the middle of an event stream."""
    return b"data: " + json.dumps(error_record(error), ensure_ascii=False).encode() + b"\n\n"
