"""Restarts: what was lost is started anew, after longer and longer pauses, until it is hopeless."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from metainfer.core.errors import MetainferError
from metainfer.core.units import format_seconds

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each attempt. Once all were made in vain, or in short succession, there is no other."""

SOUND_S = 60.0
"""What has run for so long is sound: pauses begin at the first again."""

_log = logging.getLogger(__name__)


class Restarts:
    """
    Args:
        start: starts it anew; raises what it fails with.
        pauses_s: before each attempt.

    Attributes:
        count: how often that went well.
    """

    def __init__(self, start: Callable[[], None], pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        self._start = start
        self._pauses_s = pauses_s
        self._attempts = 0
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self.count = 0

    def __call__(self, why: str) -> None:
        """Start anew. Raises MetainferError, in whose words `why` is, where that is hopeless."""
        if time.monotonic() - self._began_s > SOUND_S:
            self._attempts = 0
        while self._attempts < len(self._pauses_s):
            pause_s = self._pauses_s[self._attempts]
            self._attempts += 1
            _log.warning("%s; all ranks are started anew in %s", why, format_seconds(pause_s))
            if self._ended.wait(pause_s):
                raise MetainferError(why)
            try:
                self._start()
            except Exception as error:
                if self._ended.is_set():
                    raise MetainferError(why) from error
                why = str(error) or type(error).__name__
                continue
            self.count += 1
            self._began_s = time.monotonic()
            _log.warning("all ranks are there again")
            return
        raise MetainferError(f"{why}; {self._attempts} restarts did not help")

    def end(self) -> None:
        """No other attempt. May be called from any thread."""
        self._ended.set()
