"""Ctrl-C at a chosen moment of the main thread."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted_at(number: int, run: Callable[[], object]) -> bool:
    """Run it and raise SIGINT at the event of that number of the main thread: a call, a line or a
    return. Returns whether there were as many. Lines that go back are not counted: Python lets
    nothing come between the last line of a `with` and the release of its lock."""
    left = number

    def trace_from(line: int) -> Callable[[FrameType, str, object], Any]:
        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal left, line
            if event == "line":
                back, line = frame.f_lineno < line, frame.f_lineno
                if back:
                    return trace
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)  # raises, or waits where it is held
            return trace

        return trace

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return trace_from(0)(frame, event, argument)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # Python drops what is raised while leavings of other tests are finalised
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
        gc.enable()
        signal.signal(signal.SIGINT, before)
    return left <= 0
