"""Server-sent events: a call's events as they come, comments in silence, abort when left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from metainfer.core.events import TextEvent
from metainfer.llm.dispatch import Call

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx not to collect the stream
)

quote: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""JSON of a value; for strings it goes straight to the C encoder."""

Result = TypeVar("Result")
ChunkWriter = Callable[[int, TextEvent], Iterable[bytes]]


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, or ClientGone as soon as the client hangs up (work is cancelled)."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Answers with the events of an open call and closes it whatever happens.

    Args:
        call: opened already, so that a refusal could still get a status of its own.
        write: bytes of the chunks for one event; it also writes errors and the end.
        ping_s: silence after which a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, call: Call, write: ChunkWriter, ping_s: float) -> None:
        super().__init__()
        self._call = call
        self._write = write
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            pass  # nobody is left to tell
        finally:
            self._call.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
        await send(start)
        async for item in self._call.stream(self._ping_s):
            body = _PING if item is None else b"".join(self._write(*item))
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
