"""Ways: how the ranks of a stage do each collective, as the plan says it.

By what was measured here: on CPUs of so many ranks, by `bench comm`; on GPUs of their links, by
`probe --measure`. Where nothing was, by bytes alone, or as NCCL does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from metainfer.core.errors import MetainferError
from metainfer.core.units import format_bytes, format_seconds
from metainfer.hardware.curves import NCCL
from metainfer.hardware.machine import Machine
from metainfer.plan.comm_record import Compared, read
from metainfer.plan.foretold import ONE_KERNEL, ONE_KERNEL_BYTES, foretold
from metainfer.plan.plan import Origin, Value
from metainfer.plan.ranks import HOST_MEMORY, NONE
from metainfer.plan.routes import OPERATIONS, PHASES, PREFILL, SUMS, Route, Router, Step, route
from metainfer.plan.wires import BLOCK, PLAIN

ONE_SHOT, TWO_SHOT, SHARED = "one-shot", "two-shot", "shared memory"
ONE_SHOT_UP_TO_BYTES = 64 * 1024
_BYTES_OF_BF16 = (BLOCK + 4) / (2 * BLOCK)  # that travel in 8 bits, with a scale for each block


def by_bytes(operation: str) -> tuple[Step, ...]:
    """Of ranks that reach each other's memory, where nothing was measured: few bytes in one round,
    many in two, in which fewer travel."""
    if operation == "all_reduce":
        return Step(ONE_SHOT_UP_TO_BYTES, ONE_SHOT), Step(None, TWO_SHOT)
    return (Step(None, SHARED),)


def way_by_bytes(operation: str, size: int) -> str:
    return Route(operation, PREFILL, by_bytes(operation)).choose(size)


def collective_ways(
    machine: Machine, carried: str, ranks: int, threads: int, wire: str, first_gpu: int = 0
) -> Value[str]:
    """As `Router.of_words` reads it; NONE where there is nobody to talk to.

    Args:
        carried: what carries collectives, one of `plan.ranks`.
        ranks: of a stage.
        threads: of each rank.
        wire: in which form sums of prefill travel.
        first_gpu: of a stage's ranks, where they have GPUs.
    """
    if ranks == 1:
        return Value(NONE, Origin.DEFAULT, "no rank shares layers with another")
    if carried != HOST_MEMORY:
        return _foretold(machine, range(first_gpu, first_gpu + ranks), wire)
    found = read(machine, ranks, threads)
    if isinstance(found, str):
        routes = [Route(one, phase, by_bytes(one)) for one in OPERATIONS for phase in PHASES]
        reason = f"by bytes alone, since {found}"
        return Value(Router(routes).words(), Origin.DEFAULT, reason)
    return _measured(found, wire)


def _measured(found: Compared, wire: str) -> Value[str]:
    routes, missing = [], []
    for operation in OPERATIONS:
        for phase in PHASES:
            form = wire if phase == PREFILL and operation in SUMS else PLAIN
            rivals = [way.rival for way in found.ways
                      if (way.operation, way.wire) == (operation, form)]  # fmt: skip
            try:
                routes.append(route(operation, phase, rivals))
            except MetainferError:
                routes.append(Route(operation, phase, by_bytes(operation)))
                missing.append(operation if form == PLAIN else f"{operation} in {form}")
    reason = f"bench comm on {found.date}: {_times(routes)}"
    if missing:
        reason += f"; by bytes alone: {', '.join(dict.fromkeys(missing))}, which it left out"
    return Value(Router(routes).words(), Origin.MEASURED, reason)


def _foretold(machine: Machine, gpus: Sequence[int], wire: str) -> Value[str]:
    """Of GPUs, by curves of their links."""
    routes, plain = [], []
    for operation in OPERATIONS:
        for phase in PHASES:
            coded = wire != PLAIN and phase == PREFILL and operation in SUMS
            rivals = foretold(machine.curves, gpus, operation, _BYTES_OF_BF16 if coded else 1.0)
            plain.append(Route(operation, phase, (Step(None, NCCL),)))
            try:
                routes.append(_bounded(route(operation, phase, rivals)))
            except MetainferError:
                routes.append(plain[-1])
    told = _times(routes)
    if not told:
        reason = "NCCL chooses by itself; `metainfer probe --measure` did not measure these GPUs"
        return Value(Router(plain).words(), Origin.DEFAULT, reason)
    return Value(Router(routes).words(), Origin.MEASURED, f"by the curves of these GPUs: {told}")


def _bounded(found: Route) -> Route:
    """One kernel makes sums of few rows alone, whatever else was measured."""
    last = found.steps[-1]
    if not last.name.startswith(ONE_KERNEL):
        return found
    steps = (*found.steps[:-1], replace(last, up_to=ONE_KERNEL_BYTES), Step(None, NCCL))
    return replace(found, steps=steps)


def _times(routes: Sequence[Route]) -> str:
    """Of sums, or else of what was compared: at the largest size of each way, against the next
    best."""
    known = [route for route in routes if route.steps[0].seconds]
    sums = [route for route in known if route.operation == "all_reduce"]
    told = "; ".join(dict.fromkeys(_times_of(route) for route in sums or known))
    others = dict.fromkeys(route.operation for route in known if sums and route not in sums)
    return f"{told}; {', '.join(others)} likewise" if others else told


def _times_of(route: Route) -> str:
    told = []
    for step in route.steps:
        if step.seconds:
            size = "" if step.up_to is None else f" at {format_bytes(step.up_to)}"
            rival = f" ({step.second} {format_seconds(step.second_s)})" if step.second else ""
            told.append(f"{step.name} {format_seconds(step.seconds)}{size}{rival}")
    return f"{route.operation} " + ", ".join(told)
