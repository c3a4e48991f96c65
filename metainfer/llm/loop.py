"""Loop: the engine thread and its two mailboxes.

Requests and aborts come in through the inbox; events go out through the outbox. Everything else,
scheduler and runner, belongs to the one thread that is in `run`. The outbox is bounded: when its
consumer does not keep up, the loop stops making steps until it does.

Ahead, the loop launches steps before it reads the results of the ones before, so that the device
has work while the host is busy with results, events and the step after, and every stage of a
pipeline has some.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from metainfer.core.errors import MetainferError, RequestError
from metainfer.core.events import EngineEvent, FinishEvent, FinishReason, Usage
from metainfer.llm.admission import check_request
from metainfer.llm.blocks import InvariantError
from metainfer.llm.client import EngineStats
from metainfer.llm.request import Request
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.step import Step, StepOutput

MAX_OUTBOX_EVENTS = 65_536
FAILURES_IN_A_ROW = 3
"""After so many failed steps without a good one between them the engine gives up."""

_log = logging.getLogger(__name__)


class Results(Protocol):
    """Of a step that was launched."""

    def wait(self) -> StepOutput: ...


class Executor(Protocol):
    """What the loop needs of `llm.runner.Runner`; `launch` only where it is to run ahead."""

    def execute(self, step: Step) -> StepOutput: ...

    def launch(self, step: Step) -> Results: ...

    def is_fatal(self, error: Exception) -> bool: ...


class Loop:
    """`run` is the body of the engine thread; the other methods may be called from any thread.

    Args:
        revive: makes the executor fit again after a fatal error, of which it is told; raises where
            that is hopeless. None: such an error is the end. Called in a thread of its own, while
            requests that have not run yet wait.
        ahead: steps that are launched before the results of the first are read, beside it.
        check_every_step: for tests: the scheduler's books are checked after every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        revive: Callable[[str], None] | None = None,
        ahead: int = 0,
        max_outbox_events: int = MAX_OUTBOX_EVENTS,
        check_every_step: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._max_outbox_events = max_outbox_events
        self._check_every_step = check_every_step
        self._ahead = ahead
        self._revive = revive
        self._flights: deque[tuple[Step, Results, float]] = deque()  # and when each was begun
        self._done_s = 0.0
        self._failures_in_a_row = 0
        # No conditions: an interrupt of the main thread between bytecodes of one leaves the lock
        # taken, or gives the next call to somebody who does not wait any more.
        self._lock = threading.Lock()
        self._work: SimpleQueue[None] = SimpleQueue()  # the engine thread waits for it
        self._news: SimpleQueue[None] = SimpleQueue()  # the consumer of events waits for it
        # Guarded by the lock:
        self._inbox: deque[Request | str] = deque()  # requests, and ids to abort
        self._outbox: deque[EngineEvent] = deque()
        self._live: set[str] = set()
        self._closing = False
        self._closed = False
        self._death: str | None = None
        self._lost: str | None = None  # why the executor is not fit
        self._reviving = False
        self._stats = self._snapshot()

    # ---- from any thread ----

    def submit(self, request: Request) -> None:
        """Queue `request`. Raises RequestError if it can never be served (400), if the queue is
        full (429), if its id is in use (400) or if the engine has stopped (503)."""
        limits = self._scheduler.limits
        check_request(request, limits)
        with self._lock:
            if self._must_end():
                raise RequestError(
                    "the engine has stopped" + (f": {self._death}" if self._death else ""),
                    code="engine_stopped",
                    status=503,
                    hint="restart it; its log says what happened",
                )
            if request.request_id in self._live:
                raise RequestError(
                    f"request id {request.request_id} is in use",
                    param="request_id",
                    code="duplicate_request_id",
                )
            if len(self._live) >= limits.max_num_seqs + limits.max_queued_requests:
                raise RequestError(
                    f"the queue is full: {limits.max_num_seqs} requests run and"
                    f" {limits.max_queued_requests} wait at most",
                    code="queue_full",
                    status=429,
                    hint="try again later, or start the engine with more --max-queued-requests",
                )
            self._live.add(request.request_id)
            self._inbox.append(request)
            self._work.put(None)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; ids that are not live are ignored."""
        with self._lock:
            if request_id in self._live:
                self._inbox.append(request_id)
                self._work.put(None)

    def events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        """See EngineClient. After the end of the loop: what is left, then nothing, at once."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            _drain(self._news)  # of what was taken before
            with self._lock:
                closed = self._closed
                taken = tuple(self._outbox)
                self._outbox.clear()
                if taken:
                    self._work.put(None)  # it may have waited for room
            if closed:
                self._news.put(None)  # for others that wait
            left_s = None if until_s is None else until_s - time.monotonic()
            if taken or closed or (left_s is not None and left_s <= 0):
                return taken
            with suppress(Empty):
                self._news.get(timeout=left_s)

    def stats(self) -> EngineStats:
        """As of the end of the last step, but with requests in the inbox counted as waiting."""
        with self._lock:
            stats, ready = self._stats, self._lost is None
            arrived = sum(isinstance(item, Request) for item in self._inbox)
        return replace(stats, num_waiting=stats.num_waiting + arrived, ready=stats.alive and ready)

    def close(self) -> None:
        """Ask `run` to end after the current step; requests that are not done are aborted."""
        with self._lock:
            self._closing = True
            self._work.put(None)

    def lose(self, why: str) -> None:
        """The executor is not fit any more, which a step would find out too."""
        with self._lock:
            if not self._reviving:
                self._lost = self._lost or why
                self._work.put(None)

    # ---- the engine thread ----

    def run(self) -> None:
        """Serve until closed or dead. Does not raise: whatever happens, every request gets its
        FinishEvent and the consumer of events is woken."""
        try:
            while self._receive():
                if self._lost is not None and not self._reviving:
                    self._recover(self._lost)
                elif self._may_step():
                    self._advance()
                    self._check()
        except Exception as error:
            _log.exception("the engine thread failed")
            self._die(f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _receive(self) -> bool:
        """Take in what came; wait while there is nothing to do. False: time to end."""
        while True:
            _drain(self._work)
            with self._lock:
                if self._must_end():
                    return False
                if self._has_news():
                    items = list(self._inbox)
                    self._inbox.clear()
                    break
            self._work.get()
        for item in items:
            if isinstance(item, Request):
                self._scheduler.add(item)
            else:
                self._emit(self._scheduler.abort(item))
        return True

    def _has_news(self) -> bool:
        lost = self._lost is not None and not self._reviving
        return bool(self._inbox or lost or self._may_step())

    def _must_end(self) -> bool:
        return self._closing or self._death is not None

    def _may_step(self) -> bool:
        if self._lost is not None:
            return False
        has_work = self._scheduler.has_work or bool(self._flights)
        return has_work and len(self._outbox) < self._max_outbox_events

    def _advance(self) -> None:
        """One step: its results; or ahead, those of the oldest, where enough are in flight."""
        now_s = time.perf_counter()
        step = self._scheduler.step()
        if not self._ahead:
            if step is not None:
                self._take_results(step, lambda: self._executor.execute(step), now_s)
            return
        most, failure = self._ahead if step is not None else 0, None
        if step is not None:
            try:
                self._flights.append((step, self._executor.launch(step), now_s))
            except Exception as error:
                most, failure = 0, error
        if len(self._flights) > most:
            self._take_oldest()
        if step is not None and failure is not None:
            while self._flights:  # the scheduler hears of steps in their order
                self._take_oldest()
            self._emit(self._step_failed(step, failure))

    def _take_oldest(self) -> None:
        step, results, since_s = self._flights.popleft()
        self._take_results(step, results.wait, since_s)

    def _take_results(self, step: Step, results: Callable[[], StepOutput], since_s: float) -> None:
        """
        Args:
            since_s: when the step was begun; it had to wait for the one before.
        """
        try:
            output = results()
        except Exception as error:
            self._emit(self._step_failed(step, error))
        else:
            now_s = time.perf_counter()
            self._scheduler.took(step, now_s - max(since_s, self._done_s))
            self._done_s = now_s
            self._failures_in_a_row = 0
            self._emit(self._scheduler.update(step, output))

    def _step_failed(self, step: Step, error: Exception) -> list[EngineEvent]:
        """End the requests of the step; others may go on, unless the device is lost or nothing
        works any more."""
        _log.error("step %d failed", step.step_id, exc_info=error)
        own = isinstance(error, MetainferError)  # a sentence
        what = str(error) if own else f"{type(error).__name__}: {error}"
        self._failures_in_a_row += 1
        if self._executor.is_fatal(error):
            self._lost = what if own else f"the device failed: {what}"
        elif self._failures_in_a_row >= FAILURES_IN_A_ROW:
            self._die(f"{FAILURES_IN_A_ROW} steps failed in a row, the last with {what}")
        return self._scheduler.fail(step, f"the model failed while it computed a step: {what}")

    def _recover(self, why: str) -> None:
        """After a fatal error: the end, or requests that ran end and the others wait."""
        if self._revive is None:
            self._die(why)
            return
        with self._lock:
            self._reviving = True
        self._flights.clear()
        self._failures_in_a_row = 0
        self._emit(self._scheduler.lose_all(why))
        threading.Thread(target=self._revived, args=(why,), name="revive", daemon=True).start()

    def _revived(self, why: str) -> None:
        """In a thread of its own."""
        assert self._revive is not None
        try:
            self._revive(why)
        except Exception as error:
            if not self._closing:
                self._die(str(error) or type(error).__name__)
        with self._lock:
            self._lost, self._reviving = None, False
            self._work.put(None)

    def _check(self) -> None:
        """Nothing may be held whenever nothing runs; in tests all books after every step."""
        if self._check_every_step:
            self._scheduler.check()
        if not self._scheduler.has_work:
            self._scheduler.check_idle()

    def _emit(self, events: list[EngineEvent]) -> None:
        stats = self._snapshot()
        with self._lock:
            self._stats = stats
            for event in events:
                if isinstance(event, FinishEvent):
                    self._live.discard(event.request_id)
            self._outbox.extend(events)
        if events:
            self._news.put(None)

    def _die(self, why: str) -> None:
        _log.critical("the engine has stopped: %s", why)
        with self._lock:
            self._death = why

    def _end(self) -> None:
        """The last act: every request that is left gets its FinishEvent."""
        reason = FinishReason.ABORT if self._death is None else FinishReason.ERROR
        error = None if self._death is None else f"the engine has stopped: {self._death}"
        with self._lock:
            self._closing = True
            arrived = [item for item in self._inbox if isinstance(item, Request)]
            self._inbox.clear()
        try:
            for request in arrived:
                self._scheduler.add(request)
            self._emit(self._scheduler.end_all(reason, error))
        except InvariantError:
            # The books are wrong, which is why the loop ends; what is owed is owed all the same.
            _log.exception("requests could not be ended in order")
        self._emit([FinishEvent(owed, reason, Usage(0, 0), error=error) for owed in self._live])
        with self._lock:
            self._closed = True
        self._news.put(None)

    def _snapshot(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.pool.blocks.num_free,
            num_blocks=scheduler.pool.blocks.count,
            num_free_slots=scheduler.pool.slots.num_free,
            num_slots=scheduler.pool.slots.count,
            num_preemptions=counters.preemptions,
            num_steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_finished=counters.finished,
            num_aborted=counters.aborted,
            num_errors=counters.errors,
            alive=not self._must_end(),
        )


def _drain(calls: SimpleQueue[None]) -> None:
    """Forget calls that nobody waits for yet."""
    with suppress(Empty):
        while True:
            calls.get_nowait()
