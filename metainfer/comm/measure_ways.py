"""Ways: how a rank takes part in a trial, by what its device can do.

`Engine` is that device: CUDA's (`measure_cuda`), or what a test puts in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from metainfer.comm import payload
from metainfer.comm.group import Stalled
from metainfer.comm.measure_collectives import Collectives
from metainfer.comm.measure_trials import Flow, Trial
from metainfer.comm.shared_memory import Counters, Meeting, SharedMemory, counter_bytes
from metainfer.hardware.curves import FROM_HOST, LOAD, NCCL, STAGED, STORE, TO_HOST

SEND, RECEIVE, HOST = "send", "receive", "host"
STAGE_CHUNK_BYTES = 4 * 2**20
_LEAST_CHUNK_BYTES = 256 * 1024
_CHUNKS = 2  # that lie in host memory at one time
_CHUNKS_OF_A_TRANSFER = 4

Started = Callable[[], None]
"""Puts a piece of work into the queue of a device."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank.

    Attributes:
        rank: place in `Machine.gpus`.
        ranks: as many counters there are.
        bus_id: of its GPU; "" where that is unknown.
        cpus: near it; () for any.
        area_bytes: of what it sends, as of what it gets and of its host memory.
        counters, stages: shared by all: `counters_bytes`, `stages_bytes`.
        folder: for files in which groups of ranks find each other.
    """

    rank: int
    ranks: int
    bus_id: str
    cpus: tuple[int, ...]
    area_bytes: int
    counters: SharedMemory
    stages: SharedMemory
    folder: Path


def counters_bytes(ranks: int) -> int:
    """Where each rank is, what it has put into host memory, and what was taken from there."""
    return counter_bytes(3 * ranks)


def stages_bytes(ranks: int) -> int:
    return ranks * _CHUNKS * STAGE_CHUNK_BYTES


class Engine(Protocol):
    """What one rank's device can do; work is queued in lanes that run at the same time.

    Attributes:
        device: torch's name of where its areas are.
        collectives: torch's name of the library of collectives.
    """

    device: str
    collectives: str

    def area(self, name: str) -> torch.Tensor:
        """This rank's memory for `SEND` or `RECEIVE`, int32."""

    def export(self) -> Any:
        """What another process opens both areas with."""

    def open(self, rank: int, exported: Any) -> None:
        """Reach another rank's areas. Raises MetainferError saying why not."""

    def address(self, name: str, rank: int | None = None) -> int:
        """Of an area of another rank that was opened, else of this one's, `HOST` too."""

    def stage(self) -> int:
        """Address of the memory that all ranks share."""

    def by_kernel(self, target: int, source: int, size: int, lanes: int) -> None:
        """Queue a copy that loads and stores do, `lanes` of them at the same time."""

    def by_copy_engine(self, target: int, source: int, size: int) -> None:
        """Queue a copy that takes no multiprocessor."""

    def mark(self, lane: int, work: Started) -> Callable[[], bool]:
        """Queue work in a lane; what is returned tells whether it is done."""

    def seconds(self, works: Sequence[Started], calls: int) -> float:
        """Of a call: each of `works` in a lane of its own, `calls` times; waits for the end."""

    def wait(self) -> None:
        """Until all that was queued is done."""


class Ways:
    """One rank's part in trials."""

    def __init__(self, place: Place, engine: Engine) -> None:
        self._rank, self._ranks = place.rank, place.ranks
        self._engine = engine
        self._counters = Counters(place.counters)
        self.meeting = Meeting(self._counters, place.rank)
        self._exported: Mapping[int, Any] = {}
        self._opened: set[int] = set()
        self._begun: dict[int, int] = {}
        self._collectives = Collectives(
            place.rank, engine.device, engine.collectives, place.folder, engine.seconds
        )

    def meet(self, exported: Mapping[int, Any]) -> None:
        """Learn of all ranks, and load what checking takes: the first use of it may be slow."""
        self._exported = exported
        words = self._engine.area(RECEIVE)[: 1024 // payload.WORD_BYTES]
        payload.poison(words)
        payload.problem(words, len(words), self._rank, self._rank, 1)
        payload.fill(words, self._rank, self._rank, 1)
        self._engine.wait()

    def prepare(self, trial: Trial) -> None:
        """Reach whom the trial needs. Raises MetainferError saying why that cannot be."""
        if trial.means == NCCL:
            self._collectives.join(trial.gpus)
            return
        for flow in trial.flows:
            other = flow.target if self._rank == flow.source else flow.source
            reaches = self._rank in flow.movers and flow.means not in (TO_HOST, FROM_HOST, STAGED)
            if reaches and other not in self._opened:
                self._engine.open(other, self._exported[other])
                self._opened.add(other)
            if reaches and flow.means in (STORE, LOAD):
                own = self._engine.address(SEND)
                self._engine.by_kernel(self._engine.address(RECEIVE), own, 64, 1)  # compiles
        self._engine.wait()

    def verify(self, trial: Trial, size: int, number: int, stage: int, until_s: float) -> str:
        """Send once and compare; says what was wrong."""
        if trial.means == NCCL:
            self.meeting.wait(trial.gpus, stage, until_s)
            return self._collectives.verify(trial.operation, size, number)
        for flow in trial.flows:
            if flow.source == self._rank:
                payload.fill(self._words(trial, flow, size, SEND), flow.source, flow.target, number)
                if flow.means == FROM_HOST:
                    self._between_host(trial, flow, size, SEND, outwards=True)
        self._send(trial, size, 1, stage, until_s)
        return self._problem(trial, size, number)

    def clock(
        self, trial: Trial, size: int, number: int, calls: int, samples: int, stage: int,
        until_s: float,
    ) -> tuple[list[float], str]:  # fmt: skip
        """Seconds of a call, `samples` of them, and what was wrong with what arrived last. What is
        sent is what was verified."""
        if trial.means == NCCL:
            taken = []
            for sample in range(samples):
                self.meeting.wait(trial.gpus, stage + sample, until_s)
                taken.append(self._collectives.clock(trial.operation, size, number, calls))
            return taken, ""
        taken = [
            self._send(trial, size, calls, stage + 2 * sample, until_s) for sample in range(samples)
        ]
        return taken, self._problem(trial, size, number)

    def _send(self, trial: Trial, size: int, calls: int, stage: int, until_s: float) -> float:
        """Everybody at the same time, over memory that holds nothing before."""
        for flow in trial.flows:
            if flow.target == self._rank:
                payload.poison(self._words(trial, flow, size, RECEIVE))
                if flow.means == TO_HOST:
                    self._between_host(trial, flow, size, RECEIVE, outwards=True)
        self._engine.wait()
        self._begun = {n: self._counters[2 * self._ranks + n] for n in range(self._ranks)}
        self.meeting.wait(trial.gpus, stage, until_s)
        if trial.means == STAGED:
            taken = self._through_host(trial, size, calls, until_s)
        else:
            taken = self._directly(trial, size, calls)
        self.meeting.wait(trial.gpus, stage + 1, until_s)
        return taken

    def _problem(self, trial: Trial, size: int, number: int) -> str:
        found = ""
        words = trial.flow_bytes(size) // payload.WORD_BYTES
        for flow in trial.flows:
            if flow.target == self._rank:
                if flow.means == TO_HOST:
                    self._between_host(trial, flow, size, RECEIVE, outwards=False)
                slot = self._words(trial, flow, size, RECEIVE)
                found = found or payload.problem(slot, words, flow.source, flow.target, number)
        return found

    def _directly(self, trial: Trial, size: int, calls: int) -> float:
        mine = [flow for flow in trial.flows if self._rank in flow.movers]
        works: list[Started] = []
        count = trial.flow_bytes(size)
        for flow in mine:
            source = self._offset(trial, flow, size, SEND)
            target = self._offset(trial, flow, size, RECEIVE)
            host = self._engine.address(HOST) + source if flow.source == flow.target else 0
            if flow.means == TO_HOST:
                ends = host, self._engine.address(SEND) + source
            elif flow.means == FROM_HOST:
                ends = self._engine.address(RECEIVE) + target, host
            else:
                ends = (
                    self._engine.address(RECEIVE, self._other(flow.target)) + target,
                    self._engine.address(SEND, self._other(flow.source)) + source,
                )
            if flow.means in (STORE, LOAD):
                works.append(partial(self._engine.by_kernel, *ends, count, len(mine)))
            else:
                works.append(partial(self._engine.by_copy_engine, *ends, count))
        return self._engine.seconds(works, calls) if works else 0.0

    def _through_host(self, trial: Trial, size: int, calls: int, until_s: float) -> float:
        """Chunks go out to shared memory while those before them come in from there."""
        count = trial.flow_bytes(size)
        chunk = min(
            count, STAGE_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, count // _CHUNKS_OF_A_TRANSFER)
        )
        ends = []
        for flow in trial.flows:
            for rank, outwards in ((flow.source, True), (flow.target, False)):
                if rank == self._rank:
                    offset = self._offset(trial, flow, size, SEND if outwards else RECEIVE)
                    own = self._engine.address(SEND if outwards else RECEIVE) + offset
                    begun = self._begun[flow.source]
                    ends.append(self._end(flow.source, outwards, own, count, chunk, calls, begun))
        began_s = time.perf_counter()
        left = [step for step in ends if not step()]
        while left:
            os.sched_yield()
            left = [step for step in left if not step()]
            if time.monotonic() > until_s:
                raise Stalled(f"rank {self._rank} waited for a chunk in host memory in vain")
        return (time.perf_counter() - began_s) / calls

    def _end(
        self, source: int, outwards: bool, own: int, count: int, chunk: int, calls: int, begun: int
    ) -> Callable[[], bool]:
        """One end of a flow through the host: each call goes a step on, and tells whether it is
        done. Chunks are counted on from those of trials before."""
        pieces = [(at, min(chunk, count - at)) for at in range(0, count, chunk)] * calls
        put, got = self._ranks + source, 2 * self._ranks + source
        counters, engine = self._counters, self._engine
        state: dict[str, Any] = {"number": 0, "done": None}

        def step() -> bool:
            number = state["number"]
            if state["done"] is not None:
                if not state["done"]():
                    return False
                number = state["number"] = number + 1
                counters[put if outwards else got] = begun + number
                state["done"] = None
            if number == len(pieces):
                return True
            ready = counters[put] - begun > number
            free = number - (counters[got] - begun) < _CHUNKS
            if free if outwards else ready:
                at, length = pieces[number]
                stage = engine.stage() + (source * _CHUNKS + number % _CHUNKS) * STAGE_CHUNK_BYTES
                ways = (stage, own + at) if outwards else (own + at, stage)
                copied = partial(engine.by_copy_engine, *ways, length)
                state["done"] = engine.mark(int(outwards), copied)
            return False

        return step

    def _between_host(
        self, trial: Trial, flow: Flow, size: int, area: str, *, outwards: bool
    ) -> None:
        """A slot, its guard too, to or from this rank's host memory."""
        own = self._engine.address(area) + self._offset(trial, flow, size, area)
        host = self._engine.address(HOST) + self._offset(trial, flow, size, SEND)
        length = trial.flow_bytes(size) + payload.GUARD_BYTES
        self._engine.by_copy_engine(*((host, own) if outwards else (own, host)), length)
        self._engine.wait()

    def _words(self, trial: Trial, flow: Flow, size: int, area: str) -> torch.Tensor:
        """int32: its payload in what is sent; payload and guard in what is received."""
        begin = self._offset(trial, flow, size, area)
        length = trial.flow_bytes(size) + (payload.GUARD_BYTES if area == RECEIVE else 0)
        words = self._engine.area(area)
        return words[begin // payload.WORD_BYTES : (begin + length) // payload.WORD_BYTES]

    def _offset(self, trial: Trial, flow: Flow, size: int, area: str) -> int:
        sent, got = trial.slot_in(flow)
        return (sent if area == SEND else got) * trial.slot_bytes(size, payload.GUARD_BYTES)

    def _other(self, rank: int) -> int | None:
        return None if rank == self._rank else rank

    def close(self) -> None:
        self._collectives.leave()
        self._counters.close()
