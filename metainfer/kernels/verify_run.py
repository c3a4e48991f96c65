"""Runs checks in processes of their own: a kernel that crashes or hangs costs its own check alone.

After an illegal access a process can do nothing more on a GPU. Its place is taken by a new one,
which goes on behind the check at fault. Results are compared by several processes at once, since
compiling takes most of the time; calls are timed by one alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from metainfer.ops.base import Load
from metainfer.ops.floor import Rates

_LONGEST_CHECK_S = 240.0
_LONGEST_START_S = 120.0
_POLL_S = 0.5

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, slots=True)
class Check:
    """One operation at one case and size.

    Attributes:
        phase: "prefill" or "decode".
        backend: which is checked; "" for the one that the order chooses.
    """

    op: str
    case: Any
    phase: str
    load: Load
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check.

    Attributes:
        backend: which ran; "" where none would.
        error: largest difference over the largest number expected.
        problem: what is wrong, in a few words; "" where nothing is.
        seconds: median of a call; None where it was not timed.
    """

    backend: str
    error: float
    problem: str
    seconds: float | None = None


Numbered = tuple[int, Check]


@dataclass(frozen=True, slots=True)
class Where:
    """What a worker runs on; see `platform.platform`."""

    device: str
    code_for: str | None
    order: str
    seed: int


@dataclass(frozen=True, slots=True)
class Verified:
    """All outcomes in the order of the checks (None: the time did not reach it), and the rates."""

    outcomes: tuple[Outcome | None, ...]
    rates: Rates


def verify(
    where: Where,
    checks: Sequence[Check],
    workers: int,
    on_progress: Progress,
    budget_s: float | None = None,
) -> Verified:
    """Compare and time all checks.

    Args:
        workers: processes that compare at once.
        budget_s: no check is begun after it.
    """
    until_s = None if budget_s is None else time.monotonic() + budget_s
    outcomes: dict[int, Outcome] = {}
    total = 2 * len(checks)
    shares = [list(enumerate(checks))[n::workers] for n in range(workers)]

    def compared(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        on_progress(len(outcomes), total)

    in_processes(_compare, where, [share for share in shares if share], compared, until_s)
    good = [
        (number, replace(checks[number], backend=outcomes[number].backend))
        for number in sorted(outcomes)
        if not outcomes[number].problem
    ]
    rates: list[Rates] = []
    timed: set[int] = set()

    def clocked(number: int, result: Any) -> None:
        if isinstance(result, Rates):
            rates.append(result)
            return
        problem = result.problem if isinstance(result, Outcome) else ""
        seconds = None if isinstance(result, Outcome) else result
        outcomes[number] = replace(outcomes[number], seconds=seconds, problem=problem)
        timed.add(number)
        on_progress(len(outcomes) + len(timed), total)

    in_processes(_clock, where, [good], clocked, until_s)
    ordered = tuple(outcomes.get(number) for number in range(len(checks)))
    return Verified(ordered, rates[0] if rates else Rates(1.0, {"float32": 1.0}, 0.0))


def in_processes(
    work: Callable[..., None],
    where: Where,
    shares: Iterable[Sequence[Numbered]],
    on_result: Callable[[int, Any], None],
    until_s: float | None = None,
    longest_s: float = _LONGEST_CHECK_S,
) -> None:
    """Let a process do each share at the same time; tell of results as they come.

    Args:
        work: called in the process as work(connection, where, checks); sends (number, result).
        until_s: of the monotonic clock: what is not done then is left.
        longest_s: of one check.
    """
    running = [_Share(work, where, share, longest_s) for share in shares]
    try:
        while running:
            wait([share.connection for share in running], _POLL_S)
            for share in list(running):
                for number, result in share.news():
                    on_result(number, result)
                if until_s is not None and time.monotonic() > until_s:
                    share.left = share.left[:0]
                if not share.goes_on():
                    running.remove(share)
                    share.end()
    finally:
        for share in running:
            share.end()


class _Share:
    """A list of checks and the process that works on it, which may be followed by others."""

    def __init__(
        self,
        work: Callable[..., None],
        where: Where,
        checks: Sequence[Numbered],
        longest_s: float,
    ) -> None:
        self._work = work
        self._where = where
        self._longest_s = longest_s
        self.left = list(checks)
        self._start()

    def _start(self) -> None:
        # A process with threads, or with a GPU's context, must not be forked.
        spawn = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = spawn.Pipe(duplex=False)
        self._process: BaseProcess = spawn.Process(
            target=_in_worker, args=(self._work, theirs, self._where, self.left), daemon=True
        )
        self._process.start()
        theirs.close()
        self._heard_s = time.monotonic()
        self._begun = False

    def news(self) -> list[tuple[int, Any]]:
        """(number of the check, result) of what has come; a check that ended its process, or takes
        too long, has an Outcome that says so."""
        alive = self._process.is_alive()  # before reading: nothing comes from one that has ended
        found: list[tuple[int, Any]] = []
        with suppress(EOFError, OSError):
            while self.connection.poll():
                number, result = self.connection.recv()
                self._heard_s = time.monotonic()
                self._begun = True
                found.append((number, result))
                self.left = [(n, one) for n, one in self.left if n != number]
        longest_s = self._longest_s + (0.0 if self._begun else _LONGEST_START_S)
        silent = time.monotonic() - self._heard_s > longest_s
        if not self.left or (alive and not silent):
            return found
        if alive or self._process.exitcode or not self._begun:
            number, one = self.left.pop(0)
            why = f"did not end within {longest_s:g} s" if alive else self._how_it_ended()
            found.append((number, Outcome(one.backend, float("inf"), why)))
        self.end()
        if self.left:
            self._start()
        return found

    def _how_it_ended(self) -> str:
        code = self._process.exitcode or 0
        if code < 0:
            return f"ended its process with {signal.Signals(-code).name}"
        return f"ended its process with code {code}"

    def goes_on(self) -> bool:
        return bool(self.left)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _in_worker(
    work: Callable[..., None], connection: Connection, where: Where, checks: Sequence[Numbered]
) -> None:
    """Ctrl-C ends the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(connection, where, checks)


def _compare(connection: Connection, where: Where, checks: Sequence[Numbered]) -> None:
    from metainfer.kernels.platform import platform
    from metainfer.kernels.verify import check

    on = platform(where.device, where.code_for)
    for number, one in checks:
        connection.send((number, check(on, one, where.order, where.seed)))
        _require_a_sound_device(where.device)


def _clock(connection: Connection, where: Where, checks: Sequence[Numbered]) -> None:
    from metainfer.kernels.platform import platform
    from metainfer.kernels.verify import clock, rates_of

    on = platform(where.device, where.code_for)
    connection.send((-1, rates_of(on)))
    for number, one in checks:
        try:
            connection.send((number, clock(on, one, one.backend, where.seed)))
        except RuntimeError as error:
            why = f"cannot be timed: {str(error).splitlines()[0][:200]}"
            connection.send((number, Outcome(one.backend, 0.0, why)))
        _require_a_sound_device(where.device)


def _require_a_sound_device(device: str) -> None:
    """Leave the process where a GPU has been lost to it, and memory that other checks hold."""
    if device != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        os._exit(0)
