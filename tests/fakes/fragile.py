"""Work of a process that goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from metainfer.kernels.processes import Numbered


def fragile(connection: Connection, common: str, pieces: Sequence[Numbered]) -> None:
    """Crashes at 1, hangs at 3, gives its process up after 4."""
    for number, piece in pieces:
        if number == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 3:
            time.sleep(600)
        connection.send((number, f"result {common} {piece}"))
        if number == 4:
            os._exit(0)
