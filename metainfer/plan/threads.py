"""Threads of a step on a CPU."""

from __future__ import annotations

from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine
from metainfer.ops.base import Target
from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings


def threads_of(machine: Machine, settings: EngineSettings, target: Target) -> Value[int]:
    """Of one step; 0 where the host computes none. Raises UserError for more than there are."""
    if target.type != "cpu":
        return Value(0, Origin.DEFAULT, "steps run on the accelerator")
    if settings.threads is not None:
        logical = machine.cpu.logical_cores
        if settings.threads > logical:
            raise UserError(
                f"--threads {settings.threads} is more than the {logical} that the cores open to"
                " this process run at once",
                hint=f"give at most {logical}, or leave it out",
            )
        return Value(settings.threads, Origin.FLAG, "given with --threads")
    cores = machine.cpu.physical_cores
    return Value(cores, Origin.MEASURED, "one per physical core that this process may use")
