"""The process of one rank: does what it is told over a pipe, and says what came of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from metainfer.comm.measure_trials import Trial
from metainfer.comm.measure_ways import Engine, Place, Ways
from metainfer.comm.processes import die_with_parent
from metainfer.core.errors import MetainferError, first_line

MakeEngine = Callable[[Place], Engine]


@dataclass(frozen=True, slots=True)
class Meet:
    """What all others export, by rank."""

    exported: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Reach whom a trial needs."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class Verify:
    """Send once and compare."""

    trial: Trial
    size: int
    number: int
    stage: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Time calls of what was verified."""

    trial: Trial
    size: int
    number: int
    calls: int
    samples: int
    stage: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """It could not be done, and nothing is broken."""

    why: str


Order = Meet | Prepare | Verify | Clock


def cuda_engine(place: Place) -> Engine:
    from metainfer.comm.measure_cuda import CudaEngine

    return CudaEngine(place)


def work(connection: Connection, place: Place, make: MakeEngine) -> None:
    """Answers, one to each order; the first, unasked, is what others open this rank's areas with.

    Ends when the pipe does.
    """
    # Newer names of collectives, that older versions of torch do not have.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    die_with_parent()
    if place.cpus:
        with suppress(OSError):  # where the system grants fewer
            os.sched_setaffinity(0, place.cpus)
    try:
        engine = make(place)
        ways = Ways(place, engine)
        connection.send(engine.export())
    except (MetainferError, RuntimeError, OSError) as error:
        connection.send(Refused(first_line(error)))
        return
    while True:
        try:
            order = connection.recv()
        except EOFError:
            break
        connection.send(_answer(ways, order))
    ways.close()


def _answer(ways: Ways, order: Order) -> Any:
    try:
        if isinstance(order, Meet):
            return ways.meet(order.exported)
        if isinstance(order, Prepare):
            return ways.prepare(order.trial)
        if isinstance(order, Verify):
            return ways.verify(order.trial, order.size, order.number, order.stage, order.until_s)
        return ways.clock(
            order.trial, order.size, order.number, order.calls, order.samples, order.stage,
            order.until_s,
        )  # fmt: skip
    except (MetainferError, RuntimeError, OSError) as error:
        return Refused(first_line(error))
