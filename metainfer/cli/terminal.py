"""Where words go: data to stdout, everything else to stderr, colour only on a terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from metainfer.core.errors import UserError

_RED, _CYAN, _BOLD, _DIM = "31", "36", "1", "2"
_REDRAW_S = 0.1
_QUIET_LINE_S = 5.0
_SHOW_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Terminal:
    """The two streams of a command, and whether each may be coloured.

    Attributes:
        out, err: data, and everything meant for a person.
        colour: escape sequences may be written to `err`.
        live: a line on `err` may be redrawn.
    """

    out: TextIO
    err: TextIO
    colour: bool
    live: bool

    @classmethod
    def standard(cls, environment: Mapping[str, str]) -> Terminal:
        """The process's own streams, or nowhere in place of one that was closed from the start.
        Characters that a stream cannot spell are written as escapes."""
        out, err = _usable(sys.stdout), _usable(sys.stderr)
        live = err.isatty()
        return cls(out, err, live and "NO_COLOR" not in environment, live)

    def data(self, text: str, end: str = "\n") -> None:
        """Write a result to stdout at once."""
        self.out.write(text + end)
        self.out.flush()

    def say(self, text: str = "") -> None:
        """Write a line for a person to stderr."""
        self.err.write(text + "\n")
        self.err.flush()

    def heading(self, text: str) -> None:
        self.say(self.paint(text, _BOLD))

    def error(self, error: UserError) -> None:
        """`error: sentence` and, where there is one, `hint: what to do`."""
        self.say(f"{self.paint('error:', _RED)} {error.message}")
        if error.hint:
            self.hint(error.hint)

    def hint(self, text: str) -> None:
        self.say(f"{self.paint('hint:', _CYAN)} {text}")

    def dim(self, text: str) -> str:
        return self.paint(text, _DIM)

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    @contextmanager
    def progress(self, label: str, unit: str = "bytes") -> Iterator[Progress]:
        """A line that tells how far something is; nothing if it takes under half a second."""
        progress = Progress(self, label, unit)
        try:
            yield progress
        finally:
            progress.close()

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """A line that tells what is waited for, where nothing counts how far it is: at once on a
        terminal, after a while otherwise; nothing if it takes under half a second."""
        progress = Progress(self, label, "")
        pause_s = _SHOW_AFTER_S if self.live else _QUIET_LINE_S
        timer = threading.Timer(pause_s, progress.tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            progress.close()


class Progress:
    """How far one thing is. Redrawn on a terminal, a line every few seconds otherwise."""

    def __init__(self, terminal: Terminal, label: str, unit: str) -> None:
        self._terminal = terminal
        self._label = label
        self._unit = unit
        self._started_s = time.monotonic()
        self._shown_s = self._started_s
        self._width = 0

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes (or whatever the unit is)."""
        now_s = time.monotonic()
        pause_s = _REDRAW_S if self._terminal.live else _QUIET_LINE_S
        if now_s - self._started_s < _SHOW_AFTER_S or now_s - self._shown_s < pause_s:
            return
        self._shown_s = now_s
        self._draw(f"{self._label} {_amount(done, total, self._unit, now_s - self._started_s)}")

    def tell(self) -> None:
        """That it goes on, without how far it is."""
        with suppress(OSError, ValueError):  # nobody may read any more
            self._draw(f"{self._label} ...")

    def say(self, text: str) -> None:
        """Write a line for a person in place of this one, which comes again below it."""
        self.close()
        self._terminal.say(text)

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._terminal.live and self._width:
            self._terminal.err.write("\r" + " " * self._width + "\r")
            self._terminal.err.flush()
            self._width = 0

    def _draw(self, line: str) -> None:
        if not self._terminal.live:
            self._terminal.say(line)
            return
        self._terminal.err.write("\r" + line.ljust(self._width))
        self._terminal.err.flush()
        self._width = len(line)


def _usable(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")  # for as long as the process lasts
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _amount(done: int, total: int, unit: str, elapsed_s: float) -> str:
    percent = 100 * done // max(total, 1)
    if unit != "bytes":
        return f"{done} of {total} {unit} ({percent} %)"
    rate = done / max(elapsed_s, 1e-9) / 1e6
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB ({percent} %, {rate:.0f} MB/s)"
