"""Work of a verifying process that goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from metainfer.kernels.verify_run import Numbered, Outcome, Where


def fragile(connection: Connection, where: Where, checks: Sequence[Numbered]) -> None:
    """Crashes at 1, hangs at 3, gives its process up after 4."""
    for number, one in checks:
        if number == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 3:
            time.sleep(600)
        connection.send((number, Outcome(one.backend, 0.0, "")))
        if number == 4:
            os._exit(0)
