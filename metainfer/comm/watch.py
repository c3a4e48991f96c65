"""Watch: bounded waits of ranks that are processes of one host, each of which sees how the others
are.

A rank that dies is noticed by all that wait, whoever they wait for; a rank that is late is named
with what it was doing. The first rank that gives up ends the waits of all others.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from metainfer.comm.group import Aborted, GroupError, RankLost, Stalled
from metainfer.comm.shared_memory import Counters, SharedMemory

OPERATIONS = (
    "nothing", "joining", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send",
    "receive", "gather", "broadcast", "part", "other work",
)  # fmt: skip
"""What a rank can be doing."""

_ABSENT, _HERE, _LEFT, _FAILED = range(4)
_PID, _STATE, _CALLS, _OPERATION, _BYTES = range(5)
_WORDS = 8  # of a rank
_WORD_BYTES = 8
_WHY_BYTES = 448
RECORD_BYTES = _WORDS * _WORD_BYTES + _WHY_BYTES
"""Of shared memory, for each rank, from its beginning on."""

_SPIN_S = 0.002  # in which the processor is only offered to others
_NAP_S = 0.0002
_LEFT_S = 1.0  # in which what a rank did before it left comes to others
_LOOK_S = 0.002  # between looks at how others are


def give_up(memory: SharedMemory, rank: int, why: str) -> None:
    """End what all ranks wait for, in the name of `rank`; its first reason stays.

    Whoever started the processes does it for a rank that ended before it joined.
    """
    state = rank * RECORD_BYTES + _STATE * _WORD_BYTES
    if memory.view[state] == _FAILED:
        return
    text = why.encode()[: _WHY_BYTES - 1]
    begin = rank * RECORD_BYTES + _WORDS * _WORD_BYTES
    memory.view[begin : begin + len(text)] = text
    memory.view[state] = _FAILED


class Watch:
    """One rank's view of all ranks of a world."""

    def __init__(self, memory: SharedMemory, rank: int, size: int, deadline_s: float) -> None:
        """
        Args:
            memory: shared, all zero before the first rank joins.
            deadline_s: how long a wait may last.
        """
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self._memory = memory
        self._words = Counters(memory)
        self._processes: dict[int, int] = {}
        self._ends = select.poll()
        self._polled = threading.Lock()  # a watchdog looks too

    def join(self) -> None:
        """Be there, and wait until all are. Raises GroupError."""
        self._write(_PID, os.getpid())
        self._write(_STATE, _HERE)
        self.begin("joining", 0)
        self.until(
            lambda: all(self._read(rank, _STATE) != _ABSENT for rank in range(self.size)),
            lambda: [r for r in range(self.size) if self._read(r, _STATE) == _ABSENT],
        )
        self.check()  # one that ended before it joined has no process to follow
        for rank in range(self.size):
            if rank != self.rank:
                self._follow(rank)
        self.check()

    def _follow(self, rank: int) -> None:
        """Hold on to the process of a rank, so that its end is seen."""
        try:
            descriptor = os.pidfd_open(self._read(rank, _PID))
        except ProcessLookupError:
            if self._read(rank, _STATE) == _HERE:
                raise self._lost(rank) from None
            return
        self._processes[descriptor] = rank
        self._ends.register(descriptor, select.POLLIN)

    def begin(self, operation: str, size: int) -> None:
        """Say what this rank does now, with how many bytes."""
        self._write(_OPERATION, OPERATIONS.index(operation))
        self._write(_BYTES, size)
        self._write(_CALLS, self._read(self.rank, _CALLS) + 1)

    def until(self, ready: Callable[[], bool], late: Callable[[], Sequence[int]]) -> None:
        """Wait until `ready`.

        Args:
            late: ranks that are waited for.

        Raises:
            Stalled: they did not come in time.
            RankLost: a rank has ended, or one that is waited for has left.
            Aborted: a rank has given up.
        """
        if ready():
            return
        now_s = begun_s = time.monotonic()
        look_s = now_s + _LOOK_S
        while not ready():
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + _LOOK_S
                if ready():
                    return
                self._look(late, now_s - begun_s)
            if now_s - begun_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)

    def _look(self, late: Callable[[], Sequence[int]], waited_s: float) -> None:
        self.check()
        names = list(late())
        left = [rank for rank in names if self._read(rank, _STATE) == _LEFT]
        if left and waited_s > _LEFT_S:
            raise RankLost(
                f"rank {self.rank} is in {self._doing(self.rank)}, but rank {left[0]} has left"
            )
        if waited_s > self.deadline_s:
            there = "; ".join(f"rank {rank} is in {self._doing(rank)}" for rank in names)
            raise Stalled(
                f"rank {self.rank} waited {waited_s:.3g} s in {self._doing(self.rank)} for rank"
                f" {', '.join(map(str, names))} ({there or 'nobody else is late'})"
            )

    def check(self) -> None:
        """Raises GroupError where a rank has given up or ended."""
        for rank in range(self.size):
            if self._read(rank, _STATE) == _FAILED and rank != self.rank:
                raise Aborted(f"rank {rank} gave up: {self._why(rank)}")
        with self._polled:
            ended = self._ends.poll(0)
        for descriptor, _ in ended:
            followed = self._processes.get(descriptor)
            if followed is not None and self._read(followed, _STATE) == _HERE:
                raise self._lost(followed)

    def elsewhere(self, ranks: Sequence[int]) -> list[int]:
        """Those of other ranks that are not in what this one is in; all others if there is none."""
        others = [rank for rank in ranks if rank != self.rank]
        own = self._read(self.rank, _OPERATION), self._read(self.rank, _BYTES)
        found = [r for r in others if (self._read(r, _OPERATION), self._read(r, _BYTES)) != own]
        return found or others

    def _lost(self, rank: int) -> RankLost:
        return RankLost(
            f"the process of rank {rank} ended in {self._doing(rank)} while rank {self.rank} was in"
            f" {self._doing(self.rank)}"
        )

    def fail(self, why: str) -> None:
        """End what all others wait for; the first reason stays."""
        give_up(self._memory, self.rank, why)

    def leave(self) -> None:
        """Nobody is to wait for this rank any more."""
        if self._read(self.rank, _STATE) == _HERE:
            self._write(_STATE, _LEFT)
        with self._polled:
            for descriptor in self._processes:
                with suppress(KeyError):
                    self._ends.unregister(descriptor)
                os.close(descriptor)
            self._processes.clear()

    def _doing(self, rank: int) -> str:
        if self._read(rank, _STATE) == _ABSENT:
            return "nothing: it has not joined"
        operation = OPERATIONS[self._read(rank, _OPERATION)]
        return f"{operation} of {self._read(rank, _BYTES)} bytes (call {self._read(rank, _CALLS)})"

    def _why(self, rank: int) -> str:
        begin = rank * RECORD_BYTES + _WORDS * _WORD_BYTES
        return self._memory.view[begin : begin + _WHY_BYTES].rstrip(b"\0").decode(errors="replace")

    def _read(self, rank: int, word: int) -> int:
        return self._words[rank * RECORD_BYTES // _WORD_BYTES + word]

    def _write(self, word: int, number: int) -> None:
        self._words[self.rank * RECORD_BYTES // _WORD_BYTES + word] = number


class Watchdog:
    """A thread that looks how others are while this rank is busy, or waits where it cannot look."""

    def __init__(
        self, watch: Watch, on_failure: Callable[[GroupError], None], every_s: float = 0.05
    ) -> None:
        """`on_failure`: called once, in the thread, when a rank has ended or given up."""
        self._watch, self._on_failure, self._every_s = watch, on_failure, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._watch.check()
            except GroupError as error:
                self._on_failure(error)
                return

    def end(self) -> None:
        """Before the watch is left. Not to be called by `on_failure`."""
        self._ended.set()
        self._thread.join()
