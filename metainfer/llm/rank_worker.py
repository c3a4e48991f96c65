"""The process of a rank other than 0: loads its part of the model, then does as rank 0 tells it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

from metainfer.comm.group import GroupError
from metainfer.core import log
from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.platform import launcher
from metainfer.llm.flight import Flight
from metainfer.llm.make_runner import make_runner
from metainfer.llm.meeting import StandingGroup
from metainfer.llm.open_weights import open_weights, say_loaded
from metainfer.llm.rank_orders import (
    Alike,
    Answer,
    Capture,
    Done,
    DryRun,
    Failed,
    Forget,
    Launch,
    Meet,
    Order,
    Progress,
    Start,
    decode,
    digest,
    encode,
    sentence,
)
from metainfer.llm.step import Step
from metainfer.llm.step_wire import StepReceiver
from metainfer.llm.threads import settle_thread

_PROGRESS_S = 0.1
_ALIKE_S = 0.5  # within which ranks fail that fail for the same reason

_log = logging.getLogger(__name__)


def work(connection: Connection, life: Connection) -> None:
    """The body of the process.

    Args:
        life: ends when the process of rank 0 does, however it does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it and decides
    threading.Thread(target=_end_with, args=(life,), name="life", daemon=True).start()
    rank: _Rank | None = None
    inbox = _Inbox(connection)
    while True:
        order = inbox.next()
        if order is None:
            return
        if isinstance(order, Start):
            rank, answer = _started(order, inbox)
        else:
            assert rank is not None
            answer = rank.answer(order)
        with suppress(OSError):
            connection.send_bytes(encode(answer))


class _Inbox:
    """What rank 0 says.

    Attributes:
        connection: where it comes from, and where answers go.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._kept: Order | None = None

    def next(self) -> Order | None:
        """The next order; None where rank 0 has left."""
        kept, self._kept = self._kept, None
        while kept is None:
            try:
                said = decode(self.connection.recv_bytes())
            except (EOFError, OSError):
                return None
            kept = None if isinstance(said, Alike) else said
        return kept

    def is_alike(self, calls: int) -> bool:
        """Whether rank 0 says within a moment that it has failed too, after as many collectives."""
        with suppress(EOFError, OSError):
            if self.connection.poll(_ALIKE_S):
                said = decode(self.connection.recv_bytes())
                if isinstance(said, Alike):
                    return said.calls == calls
                self._kept = said
        return False


def _end_with(life: Connection) -> None:
    with suppress(EOFError, OSError):
        life.recv_bytes()
    os._exit(1)


def _started(start: Start, inbox: _Inbox) -> tuple[_Rank | None, Answer]:
    _log_as(start)
    try:
        return _Rank(start, inbox), Done()
    except Exception as error:
        if not isinstance(error, UserError):
            _log.exception("rank %d could not load its part", start.rank)
        return None, _failed(error, lost=True, apart=True)


def _log_as(start: Start) -> None:
    if start.log is None:
        return
    log.configure(start.log.level, as_json=start.log.as_json)

    def name(record: logging.LogRecord) -> bool:
        record.msg = f"rank {start.rank}: {record.msg}"
        return True

    logging.getLogger("metainfer").handlers[0].addFilter(name)


class _Rank:
    """A part of a model, who runs it, and the steps whose results were not read."""

    def __init__(self, start: Start, inbox: _Inbox) -> None:
        self._group = StandingGroup(start.rank, start.plan.ranks, start.plan.wire_dtype.value)
        self._inbox = inbox
        self._rank = start.rank
        self._flights: deque[tuple[Step, Flight]] = deque()
        self._told_s = 0.0
        self._receiver = StepReceiver()
        plan = start.plan.of_rank(start.rank)
        settle_thread(plan, start.cpus)
        began_s = time.perf_counter()
        registry = builtin_registry(launcher(start.settings.code_for)).with_tuned(start.tuned)
        checkpoint = open_weights(
            start.source, start.arch, start.settings, plan, self._tell, rank=start.rank
        )
        with checkpoint:
            _, self._runner = make_runner(
                start.arch, plan, checkpoint, registry, start.target, group=self._group
            )
            say_loaded(checkpoint, time.perf_counter() - began_s)

    def answer(self, order: Order) -> Answer:
        """Carry out an order. What fails here alone is told to the others at once, who may wait."""
        try:
            return self._carried_out(order)
        except Exception as error:
            lost = self._runner.is_fatal(error)
            if not isinstance(error, GroupError):
                _log.exception("an order failed")
            by_itself = not (lost or isinstance(error, GroupError))
            apart = not (by_itself and self._inbox.is_alike(self._group.calls))
            if apart:
                self._group.abort(f"rank {self._rank} failed: {sentence(error)}")
            return _failed(error, lost=lost, apart=apart)

    def _carried_out(self, order: Order) -> Done:
        match order:
            case Launch(reads, packed):
                # First of all, so that tables are known whatever fails.
                step = None if packed is None else self._receiver.unpacked(packed)
                read = tuple(self._read() for _ in range(reads))
                done = read if self._runner.draws else ()
                if step is not None:
                    self._flights.append((step, self._runner.launch(step)))
                return Done(done)
            case DryRun(step):
                self._runner.dry_run(step)
            case Capture():
                self._runner.capture()
            case Meet(meeting):
                self._group.meet(meeting.join(self._rank))
            case Forget(step_id):
                kept = [flight for flight in self._flights if flight[0].step_id != step_id]
                self._flights = deque(kept)
            case Start():
                raise AssertionError("a rank starts once")
        return Done()

    def _read(self) -> tuple[int, int]:
        step, flight = self._flights.popleft()
        return step.step_id, digest(flight.wait())

    def _tell(self, done: int, total: int) -> None:
        """Now and then, and at the end."""
        now_s = time.monotonic()
        if now_s - self._told_s > _PROGRESS_S or done == total:
            self._told_s = now_s
            self._inbox.connection.send_bytes(encode(Progress(done, total)))


def _failed(error: Exception, *, lost: bool, apart: bool) -> Failed:
    return Failed(
        sentence(error),
        error.hint if isinstance(error, UserError) else None,
        by_user=isinstance(error, UserError),
        by_group=isinstance(error, GroupError),
        lost=lost,
        apart=apart,
    )
