"""One streamed completion over a plain socket: HTTP/1.1 and server-sent events, timed as they come.

A client of the standard library alone, so that load can be made where no web package is.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from metainfer.core.errors import UserError

_MOST_LINE_BYTES = 1 << 24
_MOST_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `path` is what stands before /v1."""

    host: str
    port: int
    tls: bool
    path: str
    api_key: str | None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None) -> Server:
        """Raises UserError if the URL is not one of http or https."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise UserError(f"'{base_url}' is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"'{base_url}' is not a URL of a server", hint="such as http://127.0.0.1:8000"
            )
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path, api_key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


class ExchangeError(Exception):
    """A request that failed; the text says how."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times in seconds.

    Attributes:
        error: "" if it succeeded.
        started_s: `time.perf_counter()` when it was sent.
        ttft_s: until the first piece of text.
        gaps_s: between pieces of text.
        text: what was answered.
    """

    error: str
    started_s: float
    latency_s: float
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


async def get_json(server: Server, path: str, timeout_s: float) -> Any:
    """The JSON body behind GET `path`. Raises ExchangeError."""
    async with asyncio.timeout(timeout_s):
        lines = [line async for line in _exchange(server, "GET", path, None)]
    try:
        return json.loads(b"".join(lines))
    except ValueError as error:
        raise ExchangeError(f"{path} did not answer with JSON") from error


async def stream_completion(
    server: Server, path: str, body: Mapping[str, Any], timeout_s: float
) -> Outcome:
    """POST `body` (which asks for a stream with usage) and time the pieces of the answer.

    Failures of any kind come back as an Outcome with an error; cancellation is raised.
    """
    clock = _Clock()
    try:
        async with asyncio.timeout(timeout_s):
            async with aclosing(
                _exchange(server, "POST", path, json.dumps(body).encode())
            ) as lines:
                async for line in lines:
                    if line.startswith(b"data:") and clock.take(line[5:].strip()):
                        break
    except TimeoutError:
        return clock.outcome(f"no end after {timeout_s:g} s")
    except (ExchangeError, OSError, EOFError, ValueError) as error:
        return clock.outcome(str(error) or type(error).__name__)
    if not clock.usage:
        return clock.outcome("the server did not report usage: its tokens cannot be counted")
    return clock.outcome("")


class _Clock:
    """Collects the events of one answer."""

    def __init__(self) -> None:
        self.usage: Mapping[str, Any] = {}
        self._started_s = time.perf_counter()
        self._arrivals_s: list[float] = []
        self._pieces: list[str] = []

    def take(self, data: bytes) -> bool:
        """Note one event; True if it was the last. Raises ExchangeError on an error event."""
        now_s = time.perf_counter()
        if data == b"[DONE]":
            return True
        event = json.loads(data)
        if "error" in event:
            raise ExchangeError(_error_message(event))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            thoughts = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text = thoughts + (delta.get("content") or delta.get("text") or "")
            if text:
                self._arrivals_s.append(now_s)
                self._pieces.append(text)
        return False

    def outcome(self, error: str) -> Outcome:
        now_s = time.perf_counter()
        arrivals = self._arrivals_s or [now_s]
        details = self.usage.get("prompt_tokens_details") or {}
        return Outcome(
            error=error,
            started_s=self._started_s,
            latency_s=(now_s if error else arrivals[-1]) - self._started_s,
            ttft_s=arrivals[0] - self._started_s,
            gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
            prompt_tokens=self.usage.get("prompt_tokens", 0),
            output_tokens=self.usage.get("completion_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            text="".join(self._pieces),
        )


async def _exchange(
    server: Server, method: str, path: str, body: bytes | None
) -> AsyncGenerator[bytes, None]:
    """Send one request, yield the lines of the answer's body. Raises ExchangeError on any status
    but 200, with the server's own words."""
    context = ssl.create_default_context() if server.tls else None
    reader, writer = await asyncio.open_connection(
        server.host, server.port, ssl=context, limit=_MOST_LINE_BYTES
    )
    try:
        writer.write(_head(server, method, path, body) + (body or b""))
        await writer.drain()
        status, headers = await _read_head(reader)
        lines = _body_lines(reader, headers)
        if status != 200:
            text = b"".join([line async for line in lines])
            raise ExchangeError(f"HTTP {status}: {_error_message(_parsed(text))}")
        async for line in lines:
            yield line
    finally:
        writer.close()


def _head(server: Server, method: str, path: str, body: bytes | None) -> bytes:
    fields = [
        f"{method} {server.path}{path} HTTP/1.1",
        f"Host: {server.host}:{server.port}",
        "Accept: text/event-stream, application/json",
        "Connection: close",
    ]
    if server.api_key:
        fields.append(f"Authorization: Bearer {server.api_key}")
    if body is not None:
        fields += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join(fields) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        status = int(status_line.split(" ", 2)[1])
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
        raise ExchangeError("the answer is not HTTP") from None
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body_lines(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """Lines of the body, without their ends; the last one may lack an end."""
    rest = b""
    async for piece in _body_pieces(reader, headers):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _body_pieces(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := _chunk_size(await reader.readline()):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


def _chunk_size(line: bytes) -> int:
    if not line.endswith(b"\n"):
        raise ExchangeError("the server ended the connection in mid-answer")
    return int(line.split(b";")[0], 16)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _error_message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_MOST_ERROR_CHARACTERS] or "no reason given"
