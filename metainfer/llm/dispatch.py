"""Between the engine's event queue and whoever waits: routing by request id, and API calls.

`Dispatcher` drains the engine's events in one thread and hands each to its request's sink. `Call`
joins the generations of one API call (several choices or prompts) into one stream, for asyncio
(`server`) and for plain loops (`run`, `chat`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from metainfer.core.errors import RequestError
from metainfer.core.events import (
    EngineEvent,
    FinishEvent,
    FinishReason,
    GenerationEnd,
    TextEvent,
    TokenEvent,
    Usage,
)
from metainfer.llm.client import EngineClient
from metainfer.llm.generation import Generation
from metainfer.llm.request import Request

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 0.1


class Observer(Protocol):
    """Told of what happens to generations, for metrics."""

    def on_tokens(self, generation: Generation, count: int, now_s: float) -> None:
        """Before `last_token_s` is moved on to `now_s`."""

    def on_end(self, generation: Generation, end: GenerationEnd, now_s: float) -> None: ...


Sink = Callable[[EngineEvent], None]


def _call_at_once(work: Callable[[], None]) -> None:
    work()


class Dispatcher:
    """Drains an engine's events in one thread and hands each to the sink of its request.

    Args:
        post: runs a piece of work where the sinks live. The default is the dispatcher's own
            thread; an asyncio server passes `loop.call_soon_threadsafe`, so that sinks run in
            the loop and a batch of events wakes it once.
    """

    def __init__(
        self, client: EngineClient, post: Callable[[Callable[[], None]], object] = _call_at_once
    ) -> None:
        self._client = client
        self._post = post
        self._sinks: dict[str, Sink] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._drain, name="engine-events", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Requests that are waited for."""
        return len(self._sinks)

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Raises RequestError if the engine refuses it or is gone."""
        with self._lock:
            if self._failure is not None:
                raise RequestError(self._failure, code="engine_dead", status=503)
            self._sinks[request.request_id] = sink
        try:
            self._client.submit(request)
        except BaseException:
            self._forget(request.request_id)
            raise

    def stop(self, request_id: str) -> None:
        """End a request early; its FinishEvent still comes."""
        self._client.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request that nobody waits for any longer; its events are dropped."""
        self._forget(request_id)
        self._client.abort(request_id)

    def fail_all(self, sentence: str) -> None:
        """End everything that is waited for with an error. Call it where the sinks live."""
        with self._lock:
            sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            self._client.abort(request_id)
            sink(FinishEvent(request_id, FinishReason.ERROR, Usage(0, 0), error=sentence))

    def close(self) -> None:
        """Stop draining. The engine itself is not touched."""
        self._closing = True
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _forget(self, request_id: str) -> Sink | None:
        with self._lock:
            return self._sinks.pop(request_id, None)

    def _drain(self) -> None:
        try:
            while not self._closing:
                events = self._client.events(_DRAIN_TIMEOUT_S)
                if not events and not self._client.stats().alive:
                    events = self._client.events(_DRAIN_TIMEOUT_S)  # what it said before it stopped
                    if not events:
                        raise RuntimeError("the engine has stopped")
                if events:
                    self._post(lambda events=events: self._route(events))  # type: ignore[misc]
        except Exception as error:
            if self._closing:
                return
            logger.exception("no more events from the engine")
            sentence = f"the engine has failed: {error}"
            with self._lock:
                self._failure = sentence
            self._post(lambda: self.fail_all(sentence))

    def _route(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, FinishEvent):
                sink = self._forget(event.request_id)
            else:
                sink = self._sinks.get(event.request_id)
            if sink is not None:
                sink(event)


class Call:
    """The generations of one API call, as one stream of (index, event).

    Open it, read it with `stream` (asyncio) or `iterate`, close it in any case: closing aborts
    whatever has not ended.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        generations: Sequence[Generation],
        observer: Observer | None = None,
    ) -> None:
        self.generations = tuple(generations)
        self._dispatcher = dispatcher
        self._observer = observer
        self._index = {g.request.request_id: i for i, g in enumerate(self.generations)}
        self._open_count = 0
        self._async_events: asyncio.Queue[EngineEvent] | None = None
        self._events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()

    def open(self) -> None:
        """Queue all requests, or none: raises the RequestError of the first one refused."""
        sink = self._events.put if self._async_events is None else self._async_events.put_nowait
        try:
            for generation in self.generations:
                self._dispatcher.submit(generation.request, sink)
                self._open_count += 1
        except BaseException:
            for generation in self.generations[: self._open_count]:
                self._dispatcher.abort(generation.request.request_id)
            self._open_count = 0
            raise

    def open_async(self) -> None:
        """As `open`, for a dispatcher that posts to this event loop."""
        self._async_events = asyncio.Queue()
        self.open()

    async def stream(
        self, idle_s: float | None = None
    ) -> AsyncIterator[tuple[int, TextEvent] | None]:
        """All events until the last generation ends. None whenever `idle_s` went by without."""
        assert self._async_events is not None, "open_async comes first"
        while self._open_count:
            try:
                async with asyncio.timeout(idle_s):
                    event = await self._async_events.get()
            except TimeoutError:
                yield None
                continue
            for item in self._push(event):
                yield item

    def iterate(self) -> Iterator[tuple[int, TextEvent]]:
        """All events until the last generation ends."""
        while self._open_count:
            yield from self._push(self._events.get())

    def close(self) -> None:
        """Abort what has not ended. May be called twice."""
        if not self._open_count:
            return
        self._open_count = 0
        now_s = time.monotonic()
        for generation in self.generations:
            if generation.end is None:
                self._dispatcher.abort(generation.request.request_id)
                end = generation.cut_off()
                if self._observer is not None:
                    self._observer.on_end(generation, end, now_s)

    def _push(self, event: EngineEvent) -> list[tuple[int, TextEvent]]:
        index = self._index[event.request_id]
        generation = self.generations[index]
        now_s = time.monotonic()
        if isinstance(event, TokenEvent):
            self._see_tokens(generation, len(event.token_ids), now_s)
        was_stopped = generation.stopped
        events = generation.push(event)
        if generation.stopped and not was_stopped:
            self._dispatcher.stop(generation.request.request_id)
        if generation.end is not None:
            self._open_count -= 1
            if self._observer is not None:
                self._observer.on_end(generation, generation.end, now_s)
        return [(index, event) for event in events]

    def _see_tokens(self, generation: Generation, count: int, now_s: float) -> None:
        if self._observer is not None:
            self._observer.on_tokens(generation, count, now_s)
        if generation.first_token_s is None:
            generation.first_token_s = now_s
        generation.last_token_s = now_s
