"""Crew: the processes of all ranks. One that dies or does not answer ends the crew, never the
measurement."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from metainfer.comm.measure_ways import Place, counters_bytes, stages_bytes
from metainfer.comm.measure_worker import MakeEngine, Meet, Order, Refused, work
from metainfer.comm.processes import how_it_ended
from metainfer.comm.shared_memory import SharedMemory
from metainfer.core.errors import MetainferError
from metainfer.kernels.processes import interrupts_held

_POLL_S = 0.2
_LONGEST_END_S = 5.0


class Lost(MetainferError):
    """Ranks that died or did not answer in time; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Member:
    """Of a crew to be: place in `Machine.gpus`, bus and near processors of its GPU."""

    rank: int
    bus_id: str
    cpus: tuple[int, ...]


class Crew:
    """Attributes:
    refused: why ranks that could not begin are not there.
    present: ranks that are.
    """

    def __init__(
        self, members: Sequence[Member], area_bytes: int, make: MakeEngine, until_s: float
    ) -> None:
        """Start all and let them meet. Raises Lost."""
        self._folder = Path(tempfile.mkdtemp(prefix="metainfer-"))
        ranks = 1 + max(member.rank for member in members)
        counters, stages = SharedMemory(counters_bytes(ranks)), SharedMemory(stages_bytes(ranks))
        self._memories = counters, stages
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        self.refused: dict[int, str] = {}
        self._stage = 0
        try:
            for one in members:
                place = Place(
                    one.rank, ranks, one.bus_id, one.cpus, area_bytes, counters, stages,
                    self._folder,
                )  # fmt: skip
                self._start(place, make)
            answers = self._gather(self._connections, until_s)
            self.refused = {r: a.why for r, a in answers.items() if isinstance(a, Refused)}
            self.present = tuple(sorted(set(answers) - set(self.refused)))
            exported = {rank: answers[rank] for rank in self.present}
            self.ask(self.present, Meet(exported), until_s)
        except BaseException:
            self.end()
            raise

    def _start(self, place: Place, make: MakeEngine) -> None:
        # A process with threads, or with a GPU's context, must not be forked.
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(theirs, place, make), daemon=True)
        with interrupts_held():
            process.start()
        theirs.close()
        self._processes[place.rank], self._connections[place.rank] = process, ours

    def next_stage(self, steps: int) -> int:
        """The first of `steps` numbers for meetings, larger than all before."""
        self._stage += steps + 1
        return self._stage - steps

    def ask(self, ranks: Sequence[int], order: Order, until_s: float) -> dict[int, Any]:
        """Everybody's answer. Raises Lost."""
        asked = {rank: self._connections[rank] for rank in ranks}
        for rank, connection in asked.items():
            try:
                connection.send(order)
            except OSError:
                raise Lost(self._how_it_ended(rank)) from None
        return self._gather(asked, until_s)

    def _gather(self, asked: Mapping[int, Connection], until_s: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(asked):
            late = {asked[rank]: rank for rank in asked if rank not in answers}
            for connection in wait(list(late), min(_POLL_S, max(0.0, until_s - time.monotonic()))):
                assert isinstance(connection, Connection)
                rank = late[connection]
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    raise Lost(self._how_it_ended(rank)) from None
            silent = [rank for rank in asked if rank not in answers]
            if silent and time.monotonic() > until_s:
                names = ", ".join(map(str, silent))
                raise Lost(f"the process of GPU {names} did not answer in time")
        return answers

    def _how_it_ended(self, rank: int) -> str:
        return how_it_ended(self._processes[rank], f"GPU {rank}")

    def end(self) -> list[str]:
        """End all processes and wait for them; says which are still there."""
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            process.kill()
        until_s = time.monotonic() + _LONGEST_END_S
        for process in self._processes.values():
            process.join(max(0.1, until_s - time.monotonic()))
        left = [f"process {p.pid} does not end" for p in self._processes.values() if p.is_alive()]
        for memory in self._memories:
            with suppress(BufferError):
                memory.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return left
