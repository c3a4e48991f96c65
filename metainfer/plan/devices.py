"""Devices: where the engine runs, and as which GPU's code."""

from __future__ import annotations

from metainfer.core.errors import UserError
from metainfer.hardware.device_names import gpu_number
from metainfer.hardware.machine import Gpu, Machine, Unknown, gpus_of
from metainfer.ops.base import Target
from metainfer.ops.targets import parse_portable
from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings

NATIVE = "native"
"""The code that runs is that of the device itself."""


def gpu_targets(machine: Machine, settings: EngineSettings) -> list[Target]:
    """Of the code that the GPUs would run, by GPU: of the one that is asked for, else of all that
    can run it; [] where none is known and none is asked for.

    Raises UserError for GPUs that are not there, and code that they do not run.
    """
    wanted = None if settings.code_for is None else parse_portable(settings.code_for)
    gpus = _asked_gpus(machine, settings)
    if wanted is None:
        return [Target("cuda", gpu.capability) for gpu in gpus]
    if settings.device == "cpu":
        raise UserError(
            f"a CPU does not run the code of {settings.code_for}",
            hint="leave --as or --device out",
        )
    if not gpus:
        why = machine.gpus.why if isinstance(machine.gpus, Unknown) else "none is listed"
        raise UserError(
            f"--as {settings.code_for} asks for a GPU, and none is known here ({why})",
            hint="leave --as out to run on the CPU",
        )
    able = [gpu for gpu in gpus if gpu.capability >= wanted]
    if not able:
        raise UserError(
            f"{gpus[0].name} is older than {settings.code_for} and cannot run its code",
            hint="leave --as out",
        )
    return [Target("cuda", wanted) for _ in able]


def _asked_gpus(machine: Machine, settings: EngineSettings) -> tuple[Gpu, ...]:
    if settings.device == "cpu":
        return ()
    gpus = gpus_of(machine)
    asked = gpu_number(settings.device or "")
    if asked is None or not gpus:
        return gpus
    if asked >= len(gpus):
        raise UserError(
            f"--device cuda:{asked}: there are {len(gpus)} GPUs, from cuda:0 on",
            hint="name one of them, or leave --device out",
        )
    return gpus[asked : asked + 1]


def gpu_index(machine: Machine, settings: EngineSettings, target: Target) -> int:
    """Which of the machine's GPUs runs the code of `target`: the one asked for, or the first that
    can. 0 on the CPU."""
    asked = gpu_number(settings.device or "")
    if asked is not None:
        return asked
    if isinstance(machine.gpus, Unknown) or target.capability is None:
        return 0
    for number, gpu in enumerate(machine.gpus):
        older = settings.code_for is not None and gpu.capability >= target.capability
        if older or gpu.capability == target.capability:
            return number
    return 0


def code_for(machine: Machine, settings: EngineSettings, target: Target) -> Value[str]:
    """Whose code runs."""
    if settings.code_for is None:
        return Value(NATIVE, Origin.DEFAULT, "what was compiled for the device itself is fastest")
    name = "the GPU"
    if not isinstance(machine.gpus, Unknown) and machine.gpus:
        name = machine.gpus[gpu_index(machine, settings, target)].name
    reason = f"given with --as; {name} translates it from PTX, libraries' products are left out"
    return Value(settings.code_for, Origin.FLAG, reason)
