"""Ctrl-C and SIGTERM: exceptions at once, so that verbs clean up what they had begun, but none
inside an import.

Libraries hold imports of theirs in `except` clauses that swallow whatever comes: a command would go
on as if nobody had pressed anything, or fail with what a half-imported library raises later. So a
signal that comes while something is imported waits until that is done, but not for long; a second
one does not wait.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

_AGAIN_S = 0.02
_LONGEST_S = 2.0
"""That an import may delay the end of a process. Imports that take longer are those of the first
moments, when nothing is to be cleaned up."""
_IMPORTS = "<frozen importlib"


class Terminated(SystemExit):
    """SIGTERM came: like Ctrl-C, so that verbs clean up what they had begun. Event loops let no
    other exception than these two through."""


def handle_signals() -> None:
    """From here on the main thread hears of both as exceptions."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


def let_signals_end() -> None:
    """From here on either ends the process at once, and none waits any more."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of SIGINT."""
    if not _waits(number, frame):
        raise KeyboardInterrupt


def terminate(number: int, frame: FrameType | None) -> None:
    """Handler of SIGTERM."""
    if not _waits(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait
        raise Terminated


def _waits(number: int, frame: FrameType | None) -> bool:
    """Whether an import is under way; the signal is then raised behind it."""
    if not _is_importing(frame):
        return False
    handler = signal.signal(number, signal.SIG_DFL)
    until_s = time.monotonic() + _LONGEST_S

    def again(_alarm: int, then: FrameType | None) -> None:
        if _is_importing(then):
            if time.monotonic() > until_s:
                os._exit(128 + number)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        signal.signal(number, handler)
        signal.raise_signal(number)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    return True


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            return True
        frame = frame.f_back
    return False
