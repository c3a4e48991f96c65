"""A scripted engine: says what it is told, one token a tick for every live request.

It keeps the promises of `llm.client.EngineClient` (one event queue, batches of events, abort with
a FinishEvent, refusal at submission), so whatever stands on that protocol can be tested without a
model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from metainfer.core.errors import RequestError
from metainfer.core.events import (
    EngineEvent,
    FinishEvent,
    FinishReason,
    PromptEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from metainfer.llm.client import EngineStats
from metainfer.llm.request import Request

Script = Callable[[Request], Sequence[int]]


class ScriptError(Exception):
    """Raise it in a script: the request ends with FinishReason.ERROR and this sentence."""


def fake_logprobs(token_ids: Sequence[int], count: int | None) -> tuple[TokenLogprob, ...]:
    """Log-probabilities that depend on the token alone; the token itself is the likeliest, and
    those with the next lower ids follow."""
    if count is None:
        return ()
    found = []
    for token_id in token_ids:
        logprob = -0.125 * (token_id % 8 + 1)
        top = tuple((t, logprob - (token_id - t)) for t in range(token_id, token_id - count, -1))
        found.append(TokenLogprob(token_id, logprob, top))
    return tuple(found)


@dataclass
class _Live:
    request: Request
    tokens: Iterator[int]
    prefilled: bool = False
    num_tokens: int = 0


@dataclass
class FakeEngine:
    """See above.

    Attributes:
        script: the tokens a request generates; when they are used up, the end-of-text token.
        eos: the end-of-text token.
        max_running: requests beyond wait; `max_queued` of them, others are refused with 429.
        tokens_per_event: how many tokens come at once.
        tick_s: pause between ticks.
        cached_tokens: reported in usage.
        flowing: cleared, nothing is generated (a long prefill).
        num_blocks: of the cache; each request that is not finished holds one.
        submitted, aborted: what was asked so far.
    """

    script: Script
    eos: int = 1
    max_running: int = 10_000
    max_queued: int = 10_000
    tokens_per_event: int = 1
    tick_s: float = 0.0
    cached_tokens: int = 0
    num_blocks: int = 100
    flowing: threading.Event = field(default_factory=threading.Event)
    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flowing.set()
        self._live: dict[str, _Live] = {}
        self._events: deque[EngineEvent] = deque()
        self._changed = threading.Condition()
        self._alive = True
        self._finished = dict.fromkeys(FinishReason, 0)
        self._generated = 0
        self._prompted = 0
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    # ---- EngineClient ----

    def submit(self, request: Request) -> None:
        with self._changed:
            if len(self._live) >= self.max_running + self.max_queued:
                raise RequestError("the queue is full", code="queue_full", status=429)
            assert request.request_id not in self._live, "request ids are unique"
            self.submitted.append(request)
            self._live[request.request_id] = _Live(request, iter(()))
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self._changed:
            self.aborted.append(request_id)
            live = self._live.get(request_id)
            if live is not None:
                self._finish(live, FinishReason.ABORT)

    def events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        with self._changed:
            self._changed.wait_for(lambda: self._events or not self._alive, timeout_s)
            events = tuple(self._events)
            self._events.clear()
            return events

    def stats(self) -> EngineStats:
        with self._changed:
            running = min(len(self._live), self.max_running)
            return EngineStats(
                num_running=running,
                num_waiting=len(self._live) - running,
                num_free_blocks=self.num_blocks - len(self._live),
                num_blocks=self.num_blocks,
                num_free_slots=0,
                num_slots=0,
                num_preemptions=0,
                num_steps=0,
                prompt_tokens=self._prompted,
                generation_tokens=self._generated,
                num_finished=self._finished[FinishReason.STOP]
                + self._finished[FinishReason.LENGTH],
                num_aborted=self._finished[FinishReason.ABORT],
                num_errors=self._finished[FinishReason.ERROR],
                alive=self._alive,
            )

    # ---- for tests ----

    @property
    def num_live(self) -> int:
        """Requests that are not finished."""
        with self._changed:
            return len(self._live)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def say(self, event: EngineEvent) -> None:
        """Send one event, whatever it is about."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def die(self) -> None:
        """Stop for good, without a word to the requests that run."""
        with self._changed:
            self._alive = False
            self._changed.notify_all()
        self._thread.join()

    # ---- the ticking ----

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._live or not self._alive)
                if not self._alive:
                    return
                if self.flowing.is_set():
                    for live in list(self._live.values())[: self.max_running]:
                        self._advance(live)
                    self._changed.notify_all()
                pause_s = self.tick_s if self.flowing.is_set() else 0.01
                self._changed.wait_for(lambda: not self._alive, pause_s or 1e-4)

    def _advance(self, live: _Live) -> None:
        if not live.prefilled:
            self._prefill(live)
            return
        request, sampling = live.request, live.request.sampling
        token_ids: list[int] = []
        finish, stop = None, None
        while finish is None and len(token_ids) < self.tokens_per_event:
            token_id = next(live.tokens, self.eos)
            live.num_tokens += 1
            self._generated += 1
            is_eos = token_id == self.eos and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                finish, stop = FinishReason.STOP, token_id
                break
            token_ids.append(token_id)
            if live.num_tokens == sampling.max_tokens:
                finish = FinishReason.LENGTH
        if token_ids:
            logprobs = fake_logprobs(token_ids, sampling.logprobs)
            self._events.append(TokenEvent(request.request_id, tuple(token_ids), logprobs))
        if finish is not None:
            self._finish(live, finish, stop)

    def _prefill(self, live: _Live) -> None:
        request, sampling = live.request, live.request.sampling
        live.prefilled = True
        self._prompted += len(request.prompt_token_ids)
        try:
            live.tokens = iter(self.script(request))
        except ScriptError as error:
            self._finish(live, FinishReason.ERROR, error=str(error))
            return
        if sampling.prompt_logprobs is not None:
            others = request.prompt_token_ids[1:]
            logprobs = (None, *fake_logprobs(others, sampling.prompt_logprobs))
            self._events.append(PromptEvent(request.request_id, logprobs))
        if sampling.max_tokens == 0:
            self._finish(live, FinishReason.LENGTH)

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        request = live.request
        del self._live[request.request_id]
        self._finished[reason] += 1
        usage = Usage(len(request.prompt_token_ids), live.num_tokens, self.cached_tokens)
        stop_logprob = None
        if stop_token_id is not None:
            stop_logprob = next(
                iter(fake_logprobs([stop_token_id], request.sampling.logprobs)), None
            )
        self._events.append(
            FinishEvent(request.request_id, reason, usage, stop_token_id, error, stop_logprob)
        )
        self._changed.notify_all()
