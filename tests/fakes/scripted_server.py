"""A server of completions that says what a script says, and counts what it is asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TOKENS_PER_WORD = 3
TEMPLATE_TOKENS = 5


@dataclass
class ScriptedServer:
    """Answers like an OpenAI server; a prompt costs TEMPLATE_TOKENS + TOKENS_PER_WORD per word."""

    failing: frozenset[int] = frozenset()  # which completions (by number) get status 503
    cut: frozenset[int] = frozenset()  # which end in mid-stream
    with_usage: bool = True
    hold: threading.Event | None = None  # answers wait for it after their first token
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            if head.startswith("GET /v1/models "):
                self._send_json(writer, 200, {"data": [{"id": "scripted"}]})
            elif head.startswith("GET"):
                self._send_json(writer, 404, {"error": {"message": "no such route"}})
            else:
                length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                await self._complete(json.loads(await reader.readexactly(length)), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        if number in self.failing:
            self._send_json(writer, 503, {"error": {"message": "the queue is\nfull"}})
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            await self._stream(body, number, writer)
        finally:
            self.in_flight -= 1

    async def _stream(
        self, body: dict[str, Any], number: int, writer: asyncio.StreamWriter
    ) -> None:
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        self._send_chunk(writer, ": ping\n\n")
        for step in range(body["max_tokens"]):
            piece = {"delta": {"content": "y"}} if chat else {"text": "y"}
            self._send_chunk(writer, f"data: {json.dumps({'choices': [piece]})}\n\n")
            await writer.drain()
            await asyncio.sleep(0.001)
            if number in self.cut:
                return
            while self.hold is not None and step == 0 and not self.hold.is_set():
                await asyncio.sleep(0.01)
        usage = {
            "prompt_tokens": TEMPLATE_TOKENS + TOKENS_PER_WORD * len(prompt.split()),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self.with_usage:
            # Split inside an event: lines must be put together again.
            event = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            self._send_chunk(writer, event[:20])
            self._send_chunk(writer, event[20:])
        self._send_chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _send_chunk(writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    @staticmethod
    def _send_json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        text = json.dumps(body)
        head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """The server on a free loopback port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    started = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        started.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
