"""`metainfer env`: machine, versions and plan, as a report to paste into a bug report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.env import SECRETS, read_environment
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes
from metainfer.hardware.machine import Cpu, Gpu, Machine, Memory, Unknown
from metainfer.plan.plan import Plan
from metainfer.shipped import SHIPPED_MODEL, model_dir


@dataclass(frozen=True, slots=True)
class EnvOptions:
    """What the report is about."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory or a known name; the shipped model if not given",
        aliases=("--model",),
    )
    json: bool = flag("--json", "Print the report as JSON", False)


def run(terminal: Terminal, options: EnvOptions) -> int:
    from metainfer.bench.record import commit
    from metainfer.hardware.probe import probe
    from metainfer.plan.explain import explain

    machine = probe()
    model = options.model or SHIPPED_MODEL
    plan = _plan(machine, model)
    variables = {
        name: "(set)" if name in SECRETS else value for name, value in read_environment().items()
    }
    if options.json:
        report: dict[str, Any] = {
            "commit": commit(),
            "machine": json.loads(machine.to_json()),
            "variables": variables,
            "model": model,
            "plan": json.loads(plan.to_json())
            if isinstance(plan, Plan)
            else {"refused": plan.message},
        }
        terminal.data(json.dumps(report, indent=2))
        return 0
    rows = [("commit", commit()), *machine_rows(machine)]
    rows += [("variable", f"{name}={value}") for name, value in variables.items()]
    rows += [("model", model)]
    terminal.data("\n".join(f"{label:<10}{text}" for label, text in rows))
    terminal.data("\n" + (explain(plan) if isinstance(plan, Plan) else f"no plan: {plan.message}"))
    if isinstance(plan, UserError) and plan.hint:
        terminal.data(f"hint: {plan.hint}")
    return 0


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """(label, fact) of each line about the machine."""
    versions = [f"{name} {version}" for name, version in machine.versions.items()]
    rows = [("system", machine.system), ("cpu", _cpu(machine.cpu))]
    rows += [("memory", _memory(machine.memory))]
    if isinstance(machine.gpus, Unknown):
        rows += [("gpus", f"unknown: {machine.gpus.why}")]
    else:
        rows += [("gpu", _gpu(gpu)) for gpu in machine.gpus] or [("gpus", "none")]
        rows += [("driver", _known(machine.driver))]
    return [*rows, ("versions", ", ".join(versions))]


def _cpu(cpu: Cpu) -> str:
    cores = f"{cpu.physical_cores} cores, {cpu.logical_cores} threads"
    quota = "" if cpu.quota_cores is None else f", quota of {cpu.quota_cores:g} cores"
    isa = _known(cpu.isa) if isinstance(cpu.isa, Unknown) else " ".join(cpu.isa)
    return f"{_known(cpu.model)}, {cores}{quota}; {isa}"


def _memory(memory: Memory) -> str:
    total, available = (
        _known(size) if isinstance(size, Unknown) else format_bytes(size)
        for size in (memory.total_bytes, memory.available_bytes)
    )
    return f"{total}{'' if memory.limit_bytes is None else ' (limited)'}, available {available}"


def _gpu(gpu: Gpu) -> str:
    major, minor = gpu.capability
    size, free = format_bytes(gpu.memory_bytes), format_bytes(gpu.free_bytes)
    return f"{gpu.name}, sm_{major}{minor}, {size}, free {free}"


def _known(fact: str | Unknown | tuple[str, ...]) -> str:
    return f"unknown ({fact.why})" if isinstance(fact, Unknown) else str(fact)


def _plan(machine: Machine, model: str) -> Plan | UserError:
    """What `serve` would do without flags, or the error with which it would refuse."""
    from metainfer.arch.families import read_arch
    from metainfer.kernels.builtin import builtin_registry
    from metainfer.plan.build import build_plan, choose_target
    from metainfer.plan.proof import cache_proof
    from metainfer.plan.settings import EngineSettings

    settings = EngineSettings()
    try:
        arch = read_arch(model)
        proof = cache_proof(Path(model_dir(model)), arch, settings)
        able = choose_target(machine, arch, settings, builtin_registry().capabilities, proof)
        return build_plan(machine, arch, settings, able, proof)
    except UserError as error:
        return error


VERB = Verb(
    "env",
    "Report on machine, versions and plan, to paste",
    (("what it is about", EnvOptions),),
    run,
    ("metainfer env", "metainfer env deepseek-v4-flash --json"),
)
