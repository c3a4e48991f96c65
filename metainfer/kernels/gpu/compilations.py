"""Compilations: which kernels had to be compiled or loaded while somebody waited for them."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Compilations:
    """Counts what is compiled or loaded for the first time in this process. Warm-up is the time for
    it; while requests are served it holds them up, and is said in the log.

    Attributes:
        in_warm_up, in_service: how many.
    """

    def __init__(self) -> None:
        self.in_warm_up = 0
        self.in_service = 0
        self._serves = False

    def begin_service(self) -> None:
        """From now on requests wait for what is compiled."""
        self._serves = True

    def note(self, kernel: str) -> None:
        """A launch of `kernel` compiled or loaded it."""
        if not self._serves:
            self.in_warm_up += 1
            return
        self.in_service += 1
        _log.warning("the kernel %s was compiled while requests were served", kernel)
