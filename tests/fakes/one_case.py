"""One case of each kernel: the fewest small cases of a backend that start all it has."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from metainfer.kernels.compare import run
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.base import Load, Target
from metainfer.ops.catalogue import OPS

LOAD = Load(70, 400)


def kernels_of(
    registry: Registry, launch: RecordingLauncher, op: str, backend: str, case: Any
) -> set[str]:
    """Names of what a call starts; `launch` is the registry's. Compositions of torch's operations,
    which may look at numbers, start none of ours."""
    launch.launches.clear()
    with suppress(NotImplementedError):
        run(registry, op, backend, case, at_load(op, case, LOAD, Draw(0, "meta")))
    return {started.unit.name for started in launch.launches}


def one_of_each(
    registry: Registry, launch: RecordingLauncher, op: str, backend: str, target: Target
) -> list[int]:
    """Numbers of small cases, the last that is served and before it those whose kernels none of
    the later ones starts; [] where none is served."""
    seen: set[str] = set()
    chosen: list[int] = []
    for number, case in reversed(list(enumerate(OPS[op].small_cases))):
        if not registry.backends(op)[backend].eligible(case, target):
            continue
        new = kernels_of(registry, launch, op, backend, case) - seen
        if new or not chosen:
            chosen.insert(0, number)
        seen |= new
    return chosen
