"""Work in processes of their own: a kernel that crashes or hangs costs its own piece alone.

After an illegal access a process can do nothing more on a GPU. Its place is taken by a new one,
which goes on behind the piece at fault.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

LONGEST_PIECE_S = 240.0
_LONGEST_START_S = 120.0
_POLL_S = 0.5

Numbered = tuple[int, Any]
Work = Callable[[Connection, Any, Sequence[Numbered]], None]


def in_processes(
    work: Work,
    common: Any,
    shares: Iterable[Sequence[Numbered]],
    on_result: Callable[[int, Any], None],
    on_failure: Callable[[int, str], None],
    until_s: float | None = None,
    longest_s: float = LONGEST_PIECE_S,
) -> None:
    """Let a process do each share at the same time; tell of results as they come.

    Args:
        work: called in the process as work(connection, common, share); sends (number, result).
        on_failure: told of a piece that ended its process or took too long, and how.
        until_s: of the monotonic clock: what is not done then is left.
        longest_s: of one piece.
    """
    running = [_Share(work, common, share, longest_s) for share in shares if share]
    try:
        while running:
            wait([share.connection for share in running], _POLL_S)
            for share in list(running):
                share.tell(on_result, on_failure)
                if not share.left or (until_s is not None and time.monotonic() > until_s):
                    running.remove(share)
                    share.end()
    finally:
        for share in running:
            share.end()


class _Share:
    """A list of pieces and the process that works on it, which may be followed by others.

    Attributes:
        connection: where the process sends results.
        left: pieces without one.
    """

    def __init__(
        self, work: Work, common: Any, pieces: Sequence[Numbered], longest_s: float
    ) -> None:
        self._work = work
        self._common = common
        self._longest_s = longest_s
        self.left = list(pieces)
        self._start()

    def _start(self) -> None:
        # A process with threads, or with a GPU's context, must not be forked.
        spawn = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = spawn.Pipe(duplex=False)
        self._process: BaseProcess = spawn.Process(
            target=_in_worker, args=(self._work, theirs, self._common, self.left), daemon=True
        )
        with interrupts_held():
            self._process.start()
        theirs.close()
        self._heard_s = time.monotonic()
        self._begun = False

    def tell(
        self, on_result: Callable[[int, Any], None], on_failure: Callable[[int, str], None]
    ) -> None:
        """Pass on what has come. Where the process has ended or is silent for too long, the piece
        at fault has failed and another process goes on."""
        alive = self._process.is_alive()  # before reading: nothing comes from one that has ended
        with suppress(EOFError, OSError):
            while self.connection.poll():
                number, result = self.connection.recv()
                self._heard_s = time.monotonic()
                self._begun = True
                self.left = [piece for piece in self.left if piece[0] != number]
                on_result(number, result)
        longest_s = self._longest_s + (0.0 if self._begun else _LONGEST_START_S)
        silent = time.monotonic() - self._heard_s > longest_s
        if not self.left or (alive and not silent):
            return
        # A process that leaves with code 0 has said all that it could of its last piece.
        if alive or self._process.exitcode or not self._begun:
            number, _ = self.left.pop(0)
            why = f"did not end within {longest_s:g} s" if alive else self._how_it_ended()
            on_failure(number, why)
        self.end()
        if self.left:
            self._start()

    def _how_it_ended(self) -> str:
        code = self._process.exitcode or 0
        if code < 0:
            return f"ended its process with {signal.Signals(-code).name}"
        return f"ended its process with code {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits. Processes that start inside never get it: their parent does and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_worker(work: Work, connection: Connection, common: Any, pieces: Sequence[Numbered]) -> None:
    work(connection, common, pieces)


def require_a_sound_device(device: str) -> None:
    """In a worker, after a piece whose result was sent: give back the memory that it held, and
    leave the process if the GPU has been lost to it."""
    if device != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        os._exit(0)
