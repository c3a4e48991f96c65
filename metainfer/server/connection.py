"""One client's connection: HTTP/1.1 by h11, without patience for clients that stand still.

uvicorn itself waits for ever: for the rest of a request that was begun, and for a client that does
not read its answer. Such connections are cut here after a while, whoever is at the other end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from metainfer.core.errors import RequestError
from metainfer.server.errors import error_record
from metainfer.server.sse import quote


class Connection(H11Protocol):
    """Cuts the connection of a client that sends no whole head, no more of its body or reads
    nothing for `stall_s` seconds; the request behind it sees its client gone."""

    def __init__(self, stall_s: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stall_s = stall_s
        self._head_or_body: asyncio.TimerHandle | None = None
        self._awaits_head = False
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "streams are what servers accept"
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_or_body, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._stall_s, self.cut)

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # the end of the answer, too short for a pause
            self.loop.call_later(self._stall_s, self._cut_if_unread)

    def cut(self) -> None:
        """Close at once; what was not sent is lost."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all, or has headers without end, in the words of all other errors."""
        error = RequestError(msg.rstrip("."), code="invalid_http")
        body = quote(error_record(error)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_request(self) -> None:
        """A head must be whole in time, however slowly its bytes drip; a body must go on."""
        state = self.conn.their_state
        if state is h11.IDLE and self._awaits_head:
            return
        if self._head_or_body is not None:
            self._head_or_body.cancel()
            self._head_or_body = None
        self._awaits_head = state is h11.IDLE
        if state in (h11.IDLE, h11.SEND_BODY):
            self._head_or_body = self.loop.call_later(self._stall_s, self._cut_if_silent)

    def _cut_if_silent(self) -> None:
        self._head_or_body, self._awaits_head = None, False
        if self.flow.read_paused:  # it is our turn: the body so far is not taken in yet
            self._await_request()
        else:
            self.cut()

    def _cut_if_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.cut()
