"""One run of `bench ops`: rates first, then all operations, then the record.

Operations are measured in a process of its own, which another follows if a kernel ends it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from metainfer.bench.ops import NOTHING, OpResult, OpWork, Side, backend_sides, measure
from metainfer.bench.ops_generic import generic_side
from metainfer.bench.ops_peers import find_peers
from metainfer.bench.ops_report import GENERIC, Measured, record
from metainfer.bench.ops_settings import OpsLoad
from metainfer.bench.ops_works import works_of
from metainfer.core.errors import UserError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.probe import probe
from metainfer.kernels.memory_bound import bound_memory
from metainfer.kernels.platform import Platform, platform
from metainfer.kernels.processes import Numbered, in_processes, require_a_sound_device
from metainfer.kernels.timing import Stopwatch, measure_rates
from metainfer.kernels.verify import rates_of
from metainfer.ops.catalogue import OPS

_FACTS = -1  # in place of a work's number
_SHARE = 0.9


def run_ops(
    load: OpsLoad, on_progress: Callable[[int, int], None], on_step: Callable[[str], None]
) -> dict[str, Any]:
    """Measure what `load` asks for; returns the record.

    Raises UserError: there is no such device, model, layout or operation, or no time for any.
    """
    here = platform(load.device, None)
    if load.code_for:
        platform(load.device, load.code_for)
    works = works_of(load, here.device)
    if not works:
        of = f" of part {load.part}" if load.part else ""
        raise UserError(
            f"--ops: no operation{of} matches '{load.ops}'",
            hint="metainfer kernels list has them",
        )
    distinct = list(dict.fromkeys(map(_alike, works)))
    on_step(f"{len(distinct)} operations on {here.name}")
    until_s = None if load.budget_s is None else time.monotonic() + load.budget_s
    facts: list[Measured] = []
    found: dict[OpWork, OpResult] = {}

    def measured(number: int, result: Any) -> None:
        if number == _FACTS:
            facts.append(result)
            return
        found[distinct[number]] = result
        on_progress(len(found), len(distinct))

    def failed(number: int, why: str) -> None:
        work = distinct[number]
        cost = OPS[work.op].cost(work.case, work.load)
        measured(number, OpResult(work, cost, missing={NOTHING: why}))

    shares = [list(enumerate(distinct))]
    common = load, _most_bytes(here.device)
    in_processes(_measure, common, shares, measured, failed, until_s=until_s)
    results = [replace(found[_alike(work)], work=work) for work in works if _alike(work) in found]
    if not results:
        raise UserError("there was time for no operation", hint="give a longer --budget")
    if left := len(distinct) - len(found):
        on_step(f"{left} of {len(distinct)} operations were not reached: give a longer --budget")
    machine = json.loads(probe().to_json())
    return record(results, load, facts[0] if facts else None, machine)


def _alike(work: OpWork) -> OpWork:
    """Works that differ in who has them alone are the same to measure."""
    return replace(work, model="", ranks=1, times=0, served=False)


def _most_bytes(device: str) -> int | None:
    """Of the host's memory, where it is what operations take: most of what is free, so that inputs
    for which it does not suffice are refused and the system ends nobody."""
    free = probe().memory.available_bytes
    return None if device != "cpu" or isinstance(free, Unknown) else int(_SHARE * free)


def _measure(
    connection: Connection, common: tuple[OpsLoad, int | None], works: Sequence[Numbered]
) -> None:
    """In a process: the rates, then each work."""
    load, most_bytes = common
    here = platform(load.device)
    if most_bytes is not None:
        bound_memory(here.device, most_bytes)
    older = platform(load.device, load.code_for) if load.code_for else None
    watch = Stopwatch(here.device)
    peers = find_peers(here.device)
    portable = None if older is None else rates_of(older)
    facts = Measured(measure_rates(here.device), load.code_for, portable, dict(peers.missing))
    connection.send((_FACTS, facts))
    for number, work in works:
        taking_part = sides(work, load, here, older, peers.sides)
        connection.send((number, measure(work, taking_part, watch, load.rounds)))
        require_a_sound_device(here.device)


def sides(
    work: OpWork,
    load: OpsLoad,
    here: Platform,
    older: Platform | None,
    peers: Mapping[str, Callable[[OpWork], Side | None]],
) -> dict[str, Side | str]:
    """All that can do `work`: the kernel of this GPU first, which the others are compared with."""
    found = backend_sides(here, work)
    if older is not None:
        found[str(load.code_for)] = next(iter(backend_sides(older, work).values()))
    for name, side_of in peers.items():
        side = side_of(work)
        if side is not None:
            found[name] = side
    if load.generic:
        found[GENERIC] = generic_side(work.op)
    return found
