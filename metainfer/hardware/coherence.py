"""Coherence: what the values of a record of a machine must keep to, besides their types.

A record comes from anywhere. What no machine can be is refused when it is read, with the name of
the field, so that nothing that counts with it has to doubt it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from metainfer.core.errors import UserError
from metainfer.hardware.curves import Curve, Rate
from metainfer.hardware.facts import WRITTEN_BY, Unknown

if TYPE_CHECKING:
    from metainfer.hardware.machine import Gpu, Machine
    from metainfer.hardware.pcie import Bridge

MOST_GPUS = 64
"""Of one host. Sixteen are the most that is sold; what is counted grows with their square."""

_FROM_1 = frozenset(
    [
        "physical_cores",
        "logical_cores",
        "total_bytes",
        "multiprocessors",
        "shared_block_bytes",
        "memory_bytes_per_s",
        "sockets",
        "generation",
        "width",
        "most_generation",
        "most_width",
        "most_sm_mhz",
        "limit_w",
        "default_limit_w",
    ]
)
"""Fields, wherever they stand, whose numbers are above 0 where they are known; all others are not
below 0."""
_NAMES_SHOWN = ("name", "system")
_LONGEST_NAME = 200  # characters


def require_coherent(machine: Machine) -> None:
    """Raises UserError naming the first field that no machine can have."""
    _require_numbers(machine, "")
    quota = machine.cpu.quota_cores
    if quota is not None and quota <= 0:
        raise _odd("cpu.quota_cores", quota, "is not above 0")
    num_gpus = 0
    if not isinstance(machine.gpus, Unknown):
        num_gpus = len(machine.gpus)
        _require_gpus(machine.gpus)
    if not isinstance(machine.bridges, Unknown):
        _require_tree(machine.bridges)
    if not isinstance(machine.peers, Unknown):
        for place, peer in enumerate(machine.peers):
            _require_places(f"peers[{place}]", (peer.source, peer.target), num_gpus)
    require_measurements(machine.curves, machine.rates, num_gpus)


def require_measurements(curves: Iterable[Curve], rates: Iterable[Rate], num_gpus: int) -> None:
    """Raises UserError naming the first curve or rate that nothing can be counted with."""
    for place, curve in enumerate(curves):
        path = f"curves[{place}]"
        if len(curve.bytes) != len(curve.seconds):
            raise _odd(path, len(curve.bytes), f"sizes, but {len(curve.seconds)} times", "has")
        for low, high in pairwise((0, *curve.bytes)):
            if low >= high:
                raise _odd(f"{path}.bytes", high, f"after {low}, where sizes ascend from 1")
        for seconds in curve.seconds:
            if seconds <= 0:
                raise _odd(f"{path}.seconds", seconds, "which is not above 0")
        if not curve.gpus or len(set(curve.gpus)) < len(curve.gpus):
            raise _odd(f"{path}.gpus", list(curve.gpus), "where places of GPUs stand, each once")
        _require_places(path, curve.gpus, num_gpus)
    for place, rate in enumerate(rates):
        if rate.per_s <= 0:
            raise _odd(f"rates[{place}].per_s", rate.per_s, "which is not above 0")
        if rate.rows < 0:
            raise _odd(f"rates[{place}].rows", rate.rows, "which is below 0")


def _require_numbers(value: Any, path: str) -> None:
    """Of a record and all records in it."""
    for name, item in _fields_of(value):
        here = f"{path}{name}"
        for place, one in enumerate(item) if isinstance(item, tuple) else ((None, item),):
            at = here if place is None else f"{here}[{place}]"
            if isinstance(one, Unknown | bool):
                continue
            if is_dataclass(one):
                _require_numbers(one, f"{at}.")
            elif isinstance(one, int | float):
                least = 1 if name in _FROM_1 and isinstance(one, int) else 0
                if one < least or (name in _FROM_1 and one == 0):
                    raise _odd(at, one, "which no machine has")
            elif name in _NAMES_SHOWN and not (one.isprintable() and 0 < len(one) <= _LONGEST_NAME):
                raise _odd(at, one[:40], "which cannot be shown")


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(value):
        if field.name not in ("curves", "rates", "processes"):
            yield field.name, getattr(value, field.name)


def _require_gpus(gpus: tuple[Gpu, ...]) -> None:
    if len(gpus) > MOST_GPUS:
        raise UserError(
            f"the machine has {len(gpus)} GPUs, more than {MOST_GPUS}",
            hint="a record is of one host",
        )
    seen: set[str] = set()
    for place, gpu in enumerate(gpus):
        path = f"gpus[{place}]"
        if gpu.capability[0] < 1:
            raise _odd(f"{path}.capability", list(gpu.capability), "which no card has")
        if gpu.memory_bytes < 1:
            raise _odd(f"{path}.memory_bytes", gpu.memory_bytes, "which no machine has")
        if gpu.free_bytes > gpu.memory_bytes:
            raise _odd(f"{path}.free_bytes", gpu.free_bytes, f"of {gpu.memory_bytes} in all")
        if not isinstance(gpu.utilisation, Unknown) and gpu.utilisation > 1:
            raise _odd(f"{path}.utilisation", gpu.utilisation, "which is above 1")
        if not isinstance(gpu.bus_id, Unknown):
            if gpu.bus_id in seen:
                raise _odd(f"{path}.bus_id", gpu.bus_id, "as of another GPU")
            seen.add(gpu.bus_id)


def _require_tree(bridges: tuple[Bridge, ...]) -> None:
    """Bridges have names of their own, and no way up goes in a circle."""
    parents: dict[str, str | None] = {}
    for place, bridge in enumerate(bridges):
        if bridge.name in parents:
            raise _odd(f"bridges[{place}].name", bridge.name, "as of another bridge")
        parents[bridge.name] = bridge.parent
    for bridge in bridges:
        above, steps = bridge.parent, 0
        while above is not None and steps <= len(bridges):
            above, steps = parents.get(above), steps + 1
        if above is not None:
            raise UserError(
                f"the machine's bridges go in a circle above '{bridge.name}'",
                hint="the parent of a root is null",
            )


def _require_places(path: str, places: Iterable[int], num_gpus: int) -> None:
    for gpu in places:
        if not 0 <= gpu < num_gpus:
            raise UserError(
                f"machine field {path} names GPU {gpu}, and the machine lists {num_gpus}",
                hint="GPUs are counted from 0",
            )


def _odd(path: str, value: Any, why: str, verb: str = "is") -> UserError:
    return UserError(
        f"machine field {path} {verb} {value!r:.60}{',' if verb == 'is' else ''} {why}",
        hint=WRITTEN_BY,
    )
