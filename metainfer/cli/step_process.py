"""One verb in a process of its own, for so long and no longer: what it leaves on a GPU, breaks
there or waits for ends with it.

The process leads a group, so that Ctrl-C reaches this process alone, which then ends the group.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from metainfer.cli.interrupts import Terminated, terminate
from metainfer.cli.main import EXIT_BUG, sentence_of_os_error
from metainfer.cli.terminal import Terminal
from metainfer.core.env import read_environment
from metainfer.core.errors import UserError
from metainfer.core.units import format_seconds
from metainfer.kernels.processes import interrupts_held

EXIT_LATE = 124
"""Exit code of what did not end in time."""
_END_S = 10.0  # to clean up in
_MOST_LINES = 30


@dataclass(frozen=True, slots=True)
class Job:
    """Attributes:
    run: of a verb, on top level of its module.
    options: the records of flags that it takes.
    longest_s: after which it is ended.
    """

    run: Callable[..., int]
    options: tuple[Any, ...]
    longest_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Attributes:
    code: the verb's exit code; that of a bug where its process was lost, `EXIT_LATE` where it did
        not end in time.
    why: the error's sentence or the end of a traceback; "" for none.
    """

    code: int
    why: str = ""


def done_here(job: Job, terminal: Terminal) -> Ended:
    """Run a job in this process; what it would print as its result goes nowhere."""
    try:
        return Ended(job.run(replace(terminal, out=io.StringIO()), *job.options))
    except UserError as error:
        hint = "" if not error.hint or "\n" in error.hint else f" ({error.hint})"
        return Ended(UserError.exit_code, f"{error.message}{hint}")
    except OSError as error:
        return Ended(UserError.exit_code, sentence_of_os_error(error).message)
    except Exception:
        lines = traceback.format_exc().splitlines()
        return Ended(EXIT_BUG, "\n".join(lines[-_MOST_LINES:]))


def done_apart(job: Job, terminal: Terminal) -> Ended:
    """The same in a process that dies with this one. Its lines go to this process's stderr.

    Raises what ends this process, once the other has ended.
    """
    spawn = multiprocessing.get_context("spawn")  # nothing of a GPU may be forked
    heard, theirs = spawn.Pipe(duplex=False)
    life, held = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(job, theirs, life))
    first = signal.SIGTERM
    try:
        with interrupts_held():
            process.start()
        theirs.close()
        life.close()
        return _heard(process, heard, job.longest_s)
    except KeyboardInterrupt:
        first = signal.SIGINT  # as if it had been alone
        raise
    finally:
        _end(process, first)
        held.close()


def _heard(process: BaseProcess, heard: Connection, longest_s: float) -> Ended:
    until_s = time.monotonic() + longest_s
    if not wait([heard, process.sentinel], longest_s):
        return Ended(EXIT_LATE, f"it did not end within {format_seconds(longest_s)} and was ended")
    with suppress(EOFError):
        if heard.poll():
            ended: Ended = heard.recv()
            process.join(_END_S)
            return ended
    process.join(max(0.0, until_s - time.monotonic()))
    code = process.exitcode
    if code is not None and code < 0:
        return Ended(EXIT_BUG, f"its process was ended by {signal.Signals(-code).name}")
    return Ended(EXIT_BUG, f"its process ended with code {code} and said nothing")


def _work(job: Job, tell: Connection, life: Connection) -> None:
    os.setpgrp()
    signal.signal(signal.SIGTERM, terminate)
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        tell.send(done_here(job, Terminal.standard(read_environment())))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Terminated:
        sys.exit(128 + signal.SIGTERM)


def _end_with(life: Connection) -> None:
    """End this group as soon as nobody holds the other end of the pipe."""
    with suppress(EOFError, OSError):
        life.recv()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    os.killpg(0, signal.SIGKILL)


def _end(process: BaseProcess, first: signal.Signals) -> None:
    """Let it clean up, then leave nothing of its group.

    Args:
        first: that it gets where it has not ended by itself.
    """
    if process.pid is None:
        return
    for number in dict.fromkeys((first, signal.SIGTERM)):
        if process.is_alive():
            os.kill(process.pid, number)
            process.join(_END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # ended before it led a group
        process.kill()
    process.join()
