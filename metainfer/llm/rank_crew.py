"""RankCrew: the processes of the ranks beside rank 0, which lives in the engine's own process.

They die with this process, however it ends, and one that dies is noticed at once.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from metainfer.core.errors import MetainferError, UserError
from metainfer.kernels.processes import interrupts_held
from metainfer.llm.rank_orders import (
    Alike,
    Answer,
    Done,
    Failed,
    Meet,
    Order,
    Progress,
    Start,
    decode,
    encode,
    names_of,
)
from metainfer.llm.rank_worker import work
from metainfer.weights.load import LoadProgress

ANSWER_S = 300.0
"""The longest that an order may take, with compiling; collectives have deadlines of their own."""

_END_S = 5.0
_HEAR_S = 0.1  # between looks at what others say while rank 0 loads
_SETTLE_S = 0.5  # in which the end of a process is seen here that somebody else has noticed

_log = logging.getLogger(__name__)


class RankLostError(MetainferError):
    """A rank has ended, or cannot go on; the model is gone with it."""


class _Member(NamedTuple):
    rank: int
    process: BaseProcess
    connection: Connection
    life: Connection


class RankCrew:
    """Orders go to all ranks, in one order, and each is answered once by each of them.

    One thread at a time gives orders; `end` may be called from any.

    Args:
        starts: of ranks 1 to N - 1.
        on_progress: told of bytes of weights, summed over all ranks and divided by their number.
        on_death: told in a sentence, from another thread, that a rank has ended by itself.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        on_progress: LoadProgress | None = None,
        on_death: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._on_progress = on_progress
        self._on_death = on_death
        self._lock = threading.Lock()
        self._ending = False
        self._heard_s = 0.0
        self._death: str | None = None
        self._dead = threading.Event()
        self._loaded = {start.rank: (0, 0) for start in starts}
        self._members: list[_Member] = []
        self._came: dict[int, deque[Done | Failed]] = {start.rank: deque() for start in starts}
        try:
            for start in starts:
                self._members.append(_born(start.rank))
        except BaseException:
            self.end()
            raise
        watched = list(zip(self._members, starts, strict=True))
        threading.Thread(target=self._watch, args=(watched,), name="ranks", daemon=True).start()

    @property
    def death(self) -> str | None:
        """Which rank has ended by itself, and how; None while all live."""
        return self._death

    def progress(self, rank: int, done: int, total: int) -> None:
        """Bytes of weights of one rank, so far and in all. While rank 0 loads, this hears what the
        others say. Raises as `loaded` does, where one of them has failed."""
        self._loaded[rank] = done, total
        if self._on_progress is not None:
            found = self._loaded.values()
            most = max(total for _, total in found)
            self._on_progress(sum(done for done, _ in found) // len(self._loaded), most)
        now_s = time.monotonic()
        if rank == 0 and now_s - self._heard_s > _HEAR_S:
            self._heard_s = now_s
            for member in self._members:
                self._came[member.rank] or self._hear(member, now_s)
            for member in self._members:
                for answer in self._came[member.rank]:
                    _require_loaded(member.rank, answer)

    def check(self) -> None:
        """Raises RankLostError where a rank has ended."""
        if self._death is not None:
            raise RankLostError(self._death)

    def tell(self, order: Order | Alike) -> None:
        """Raises RankLostError where a rank has ended."""
        data = b"" if isinstance(order, Meet) else encode(order)
        for member in self._members:
            if isinstance(order, Meet):
                data = encode(order)  # what memory is shared can be told to one process at a time
            try:
                member.connection.send_bytes(data)
            except OSError:
                raise self._lost(member) from None

    def settle(self, *, suspects: bool) -> None:
        """After an error: raises RankLostError where a rank has ended.

        Args:
            suspects: the group knows of an end, or suffers from one, and may be earlier than this.
        """
        self._dead.wait(_SETTLE_S if suspects else 0.0)
        self.check()

    def ready(self, longest_s: float | None) -> bool:
        """Whether everybody's answer to the oldest order came in time.

        Raises RankLostError where a rank has ended.
        """
        until_s = None if longest_s is None else time.monotonic() + longest_s
        return all(
            self._came[member.rank] or self._hear(member, until_s) for member in self._members
        )

    def answers(self, longest_s: float | None = ANSWER_S) -> dict[int, Done | Failed]:
        """Everybody's answer to the oldest order.

        Raises RankLostError: a rank has ended, or was silent for too long.
        """
        if not self.ready(longest_s):
            silent = [member.rank for member in self._members if not self._came[member.rank]]
            raise RankLostError(f"{names_of(silent)} did not answer within {longest_s:g} s")
        return {member.rank: self._came[member.rank].popleft() for member in self._members}

    def loaded(self) -> None:
        """Wait until all have loaded their parts. Raises UserError as a rank did, and
        RankLostError."""
        for rank, answer in self.answers(longest_s=None).items():
            _require_loaded(rank, answer)

    def end(self) -> None:
        """End all processes and wait for them. May be called again."""
        with self._lock:
            self._ending = True
            members, self._members = self._members, []
        for member in members:
            member.connection.close()
            member.life.close()
        until_s = time.monotonic() + _END_S
        for member in members:
            member.process.join(max(0.1, until_s - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join(_END_S)

    def _hear(self, member: _Member, until_s: float | None) -> bool:
        """Wait for an answer of one rank; False where none came in time."""
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            try:
                if not member.connection.poll(left_s):
                    return False
                answer: Answer = decode(member.connection.recv_bytes())
            except (EOFError, OSError):
                raise self._lost(member) from None
            if not isinstance(answer, Progress):
                self._came[member.rank].append(answer)
                return True
            self.progress(member.rank, answer.done, answer.total)

    def _lost(self, member: _Member) -> RankLostError:
        """Its pipe is broken: how it ended will be known in a moment."""
        self._dead.wait(_SETTLE_S)
        return RankLostError(self._death or f"rank {member.rank} has left")

    def _watch(self, watched: Sequence[tuple[_Member, Start]]) -> None:
        """Tell each process what it is, which takes until it listens; until the first one ends."""
        for member, start in watched:
            with suppress(OSError):
                member.connection.send_bytes(encode(start))
        members = {member.process.sentinel: member for member, _ in watched}
        ended = [members[sentinel] for sentinel in wait(list(members))]  # type: ignore[index]
        with self._lock:
            if self._ending:
                return
        sentences = []
        for member in ended:
            member.process.join(_END_S)
            sentences.append(_how_it_ended(member))
        self._death = "; ".join(sentences)
        self._dead.set()
        _log.error("%s", self._death)
        self._on_death(self._death)


def _require_loaded(rank: int, answer: Done | Failed) -> None:
    if isinstance(answer, Failed) and answer.by_user:
        raise UserError(f"rank {rank}: {answer.error}", answer.hint)
    if isinstance(answer, Failed):
        raise RankLostError(f"rank {rank} could not load its part: {answer.error}")


def _born(rank: int) -> _Member:
    # A process with threads, or with a GPU's context, must not be forked.
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    life, their_life = spawn.Pipe(duplex=False)[::-1]
    process = spawn.Process(
        target=work, args=(theirs, their_life), name=f"rank {rank}", daemon=True
    )
    with interrupts_held():
        process.start()
    theirs.close()
    their_life.close()
    return _Member(rank, process, ours, life)


def _how_it_ended(member: _Member) -> str:
    code = member.process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        why = ": the system does so where memory runs out" if name == "SIGKILL" else ""
        return f"rank {member.rank} was ended by {name}{why}"
    return f"rank {member.rank} ended with code {code}"
