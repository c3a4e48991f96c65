"""Serving over a socket until a signal comes, and stopping in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from metainfer.core.errors import UserError
from metainfer.llm.dispatch import Dispatcher
from metainfer.server.connection import Connection
from metainfer.server.service import SHUTTING_DOWN, Service

EXIT_INTERRUPTED = 130

_BACKLOG = 2048
_GRACE_S = 5.0  # for sending what the end of a drain gave the clients
_AT_ONCE_S = 0.1


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Call it before anything slow is loaded.

    Raises UserError when the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: ("is in use", "choose another with --port, or 0 for a free one"),
            errno.EACCES: ("may not be opened by this user", "choose a port above 1023"),
            errno.EADDRNOTAVAIL: ("is not an address of this machine", "see --host"),
        }
        what, hint = reasons.get(
            error.errno or 0, (f"cannot be opened: {error.strerror or error}", "see --host")
        )
        raise UserError(f"port {port} on {host} {what}", hint=hint) from error


def serve_forever(
    app: FastAPI, listener: socket.socket, on_start: Callable[[], None] | None = None
) -> int:
    """Serve `app` until SIGINT or SIGTERM; returns the exit code (0 after SIGTERM, else 130).

    Then no new requests are taken, running ones get `drain_s` seconds, and the rest end with an
    error. A second SIGINT does not wait. In a thread other than the main one, signals are left
    alone and the server runs until `app.state.stop()`.

    Args:
        on_start: called when requests are taken.
    """
    service: Service = app.state.service
    _log_as_we_do()
    config = uvicorn.Config(
        app,
        http=partial(Connection, service.settings.stall_s),  # type: ignore[arg-type]
        log_config=None,
        log_level="warning",
        access_log=False,  # the guard logs requests, with their ids
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=int(service.settings.drain_s + 2 * _GRACE_S) + 1,
    )
    server = _Server(config, service, on_start)
    app.state.stop = server.stop
    server.run([listener])
    return EXIT_INTERRUPTED if server.signal_number == signal.SIGINT else 0


class _Server(uvicorn.Server):
    """uvicorn's server, except that signals are not raised again afterwards and that draining
    has an end that clients are told of."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_start: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_start = on_start
        self.signal_number: int | None = None

    def stop(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.signal_number = self.signal_number or sig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.ready = False
        loop = asyncio.get_running_loop()
        drain_s = self._service.settings.drain_s
        dispatcher = self._service.dispatcher
        timers = (
            loop.call_later(drain_s, dispatcher.fail_all, SHUTTING_DOWN),
            loop.call_later(drain_s + _GRACE_S, self._cut_all),
        )
        try:
            await super().shutdown(sockets)
            if self.force_exit:
                await self._end_at_once(dispatcher)
        finally:
            for timer in timers:
                timer.cancel()

    async def _end_at_once(self, dispatcher: Dispatcher) -> None:
        """What uvicorn leaves undone after a second Ctrl-C, whenever that came."""
        dispatcher.fail_all(SHUTTING_DOWN)
        await asyncio.sleep(_AT_ONCE_S)  # for the clients that do read
        self._cut_all()
        await asyncio.sleep(_AT_ONCE_S)
        await self.lifespan.shutdown()

    def _cut_all(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.cut()


def _log_as_we_do() -> None:
    """What uvicorn has to say goes where our own lines go."""
    ours = logging.getLogger("metainfer")
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:], theirs.propagate = ours.handlers, not ours.handlers
    # asyncio warns of each write to a connection that is gone, which is no news to anybody.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
