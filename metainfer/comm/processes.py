"""Processes of ranks: started together, ended together, and each end told in a sentence."""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from metainfer.comm.group import Aborted, GroupError, RankLost, Stalled
from metainfer.comm.world import World
from metainfer.kernels.processes import interrupts_held

T = TypeVar("T")
Report = Callable[[Any], None]
Body = Callable[[World, int, Report, Any], T]

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_POLL_S = 0.2
_END_S = 5.0


def die_with_parent() -> None:
    """From now on this process is killed when the thread ends that started it."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def how_it_ended(process: BaseProcess, name: str) -> str:
    """Of a process that has ended, or does so within seconds."""
    process.join(_END_S)
    code = process.exitcode
    if code is None:
        return f"the process of {name} does not end"
    if code < 0:
        return f"the process of {name} ended with {signal.Signals(-code).name}"
    return f"the process of {name} ended with code {code}"


def run_processes(
    world: World,
    body: Body[T],
    argument: Any,
    *,
    longest_s: float,
    on_report: Callable[[int, Any], None] = lambda rank, report: None,
    method: str = "spawn",
) -> list[T]:
    """What `body` returns in a process for each rank of a world.

    Args:
        body: called as body(world, rank, report, argument); what it reports comes at once.
        longest_s: after which all are ended.
        method: of starting processes. Those with threads, or with a GPU's context, must not fork.

    Raises:
        GroupError: a rank failed or ended; that which was the cause is told.
    """
    running = _Running(world, body, argument, method)
    try:
        return running.results(time.monotonic() + longest_s, on_report)
    finally:
        running.end()


class _Running:
    """The processes, and what came of each so far."""

    def __init__(self, world: World, body: Body[Any], argument: Any, method: str) -> None:
        self._world = world
        self._processes: list[BaseProcess] = []
        self._connections: dict[Connection, int] = {}
        self._results: dict[int, Any] = {}
        self._errors: dict[int, GroupError] = {}
        context = multiprocessing.get_context(method)
        try:
            for rank in range(world.size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_in_process, args=(theirs, world, rank, body, argument), daemon=True
                )
                with interrupts_held():
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._connections[ours] = rank
        except BaseException:
            self.end()
            raise

    def results(self, until_s: float, on_report: Callable[[int, Any], None]) -> list[Any]:
        open_ends = dict(self._connections)
        while open_ends:
            for connection in wait(list(open_ends), _POLL_S):
                assert isinstance(connection, Connection)
                rank = open_ends[connection]
                try:
                    kind, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    del open_ends[connection]
                    self._ended(rank)
                    continue
                if kind == "report":
                    on_report(rank, value)
                elif kind == "error":
                    self._errors[rank] = value
                    self._world.give_up(rank, str(value))
                    until_s = min(until_s, time.monotonic() + _END_S)
                else:
                    self._results[rank] = value
            if open_ends and time.monotonic() > until_s:
                names = ", ".join(map(str, sorted(open_ends.values())))
                self._errors.setdefault(
                    min(open_ends.values()), Stalled(f"rank {names} did not end in time")
                )
                break
        if self._errors:
            raise self._cause()
        return [self._results[rank] for rank in range(self._world.size)]

    def _ended(self, rank: int) -> None:
        """A process has closed its end, which is right only behind a result or an error."""
        if rank not in self._results and rank not in self._errors:
            error = RankLost(how_it_ended(self._processes[rank], f"rank {rank}"))
            self._errors[rank] = error
            self._world.give_up(rank, str(error))

    def _cause(self) -> GroupError:
        """The error that others follow from: of a process that ended, before one that saw it."""
        order = sorted(
            self._errors.items(),
            key=lambda item: (isinstance(item[1], Aborted), item[0] in self._told(), item[0]),
        )
        return order[0][1]

    def _told(self) -> Sequence[int]:
        """Ranks that lived to tell their error."""
        return [r for r, process in enumerate(self._processes) if process.exitcode == 0]

    def end(self) -> None:
        """All of them, at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)
        for connection in self._connections:
            connection.close()


def _in_process(
    connection: Connection, world: World, rank: int, body: Body[Any], argument: Any
) -> None:
    die_with_parent()

    def report(value: Any) -> None:
        with suppress(BrokenPipeError):
            _send(connection, "report", value)

    try:
        result = body(world, rank, report, argument)
    except GroupError as error:
        _send(connection, "error", error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"rank {rank} failed with {type(error).__name__}: {error}"
        where = f" (line {last.lineno} of {last.filename})"
        _send(connection, "error", GroupError(what + where))
    else:
        _send(connection, "result", result)
    connection.close()


def _send(connection: Connection, kind: str, value: Any) -> None:
    """By value: what torch would share ends with this process."""
    connection.send_bytes(pickle.dumps((kind, value)))
