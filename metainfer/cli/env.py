"""`metainfer env`: machine, versions and plan, as a report to paste into a bug report."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.cli.machine_flag import machine_flag
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.env import SECRETS, read_environment
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes
from metainfer.hardware.machine import Cpu, Gpu, Machine, Memory, PcieLink, Unknown
from metainfer.hardware.topology import islands, shared_uplinks
from metainfer.plan.plan import Plan
from metainfer.shipped import SHIPPED_MODEL, model_dir

if TYPE_CHECKING:
    from metainfer.kernels.registry import Registry


@dataclass(frozen=True, slots=True)
class EnvOptions:
    """What the report is about."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory or a known name; the shipped model if not given",
        aliases=("--model",),
    )
    machine: str | None = machine_flag()
    json: bool = flag("--json", "Print the report as JSON", False)


def run(terminal: Terminal, options: EnvOptions) -> int:
    from metainfer.bench.record import commit
    from metainfer.hardware.known import machine_of

    machine = machine_of(options.machine)
    model = options.model or SHIPPED_MODEL
    variables = {
        name: "(set)" if name in SECRETS else value for name, value in read_environment().items()
    }
    if options.json:
        plan = _plan(terminal, machine, model, options.machine)
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
    rows = [("commit", commit()), *machine_rows(machine), *wiring_rows(machine)]
    rows += [("variable", f"{name}={value}") for name, value in variables.items()]
    rows += [("model", model)]
    rows += [("source", text) for text in _sources(machine)]
    # What is known at once is shown at once: the plan asks kernels, which are slow to import.
    terminal.data("\n".join(wrapped(label, text) for label, text in rows))
    plan = _plan(terminal, machine, model, options.machine)
    terminal.data("\n" + _plan_text(plan))
    return 0


def _plan_text(plan: Plan | UserError) -> str:
    """Values with reasons, or why `serve` would refuse, with the hint that it would give."""
    from metainfer.plan.explain import explain

    if isinstance(plan, Plan):
        return explain(plan)
    lines = [_filled(f"no plan: {plan.message}")]
    if plan.hint:
        whose = " for `metainfer serve`" if "--" in plan.hint else ""  # its flags, not of this verb
        lines.append(_filled(f"hint{whose}: {plan.hint}"))
    return "\n".join(lines)


def _filled(text: str) -> str:
    return textwrap.fill(
        text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """(label, fact) of each line about the machine."""
    versions = [f"{name} {version}" for name, version in machine.versions.items()]
    rows = [("system", machine.system), ("cpu", _cpu(machine.cpu))]
    rows += [("memory", _memory(machine.memory))]
    if isinstance(machine.gpus, Unknown):
        rows += [("gpus", f"unknown: {machine.gpus.why}")]
    else:
        rows += [("gpu", text) for text in _counted(map(_gpu, machine.gpus))] or [("gpus", "none")]
        rows += [("driver", _known(machine.driver))]
    return [*rows, ("versions", ", ".join(versions) or "not recorded")]


def wiring_rows(machine: Machine) -> list[tuple[str, str]]:
    """(label, fact) of links of GPUs, who shares them, pairs, and what was measured."""
    if isinstance(machine.gpus, Unknown) or not machine.gpus:
        return []
    rows = [("link", text) for text in _counted(_link(gpu.link) for gpu in machine.gpus)]
    shared, sides = shared_uplinks(machine), islands(machine)
    if not isinstance(shared, Unknown):
        rows += [("shared", f"{name} by GPUs {_listed(gpus)}") for name, gpus in shared.items()]
    if not isinstance(sides, Unknown) and len(sides) > 1:
        rows += [("sockets", " and ".join(f"GPUs {_listed(gpus)}" for gpus in sides))]
    if len(machine.gpus) > 1:
        rows += [("peers", _peers(machine))]
    if machine.curves or machine.rates:
        counts = f"{len(machine.curves)} curves and {len(machine.rates)} rates"
        rows += [("measured", f"{counts}; `metainfer env --json` has them with their sources")]
    return rows


def _counted(texts: Iterable[str]) -> list[str]:
    """Texts in their order; of the same ones the first, with how many there are."""
    return [f"{n}x {text}" if n > 1 else text for text, n in Counter(texts).items()]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _link(link: PcieLink | Unknown) -> str:
    if isinstance(link, Unknown):
        return f"unknown ({link.why})"
    rate, generation, width = link.bytes_per_s(), _known(link.generation), _known(link.width)
    speed = "" if isinstance(rate, Unknown) else f", {rate / 1e9:.1f} GB/s each way by its coding"
    return f"PCIe generation {generation}, {width} lanes{speed}"


def _peers(machine: Machine) -> str:
    """How many ordered pairs reach each other's memory, and why the others do not."""
    if isinstance(machine.peers, Unknown):
        return _known(machine.peers)
    yes = sum(peer.p2p is True for peer in machine.peers)
    text = f"{yes} of {len(machine.peers)} ways from GPU to GPU reach the other's memory"
    reasons = _counted(peer.why for peer in machine.peers if peer.p2p is False)
    over = ", linked by NVLink" if machine.nvlink is True else ""
    return text + over + (f"; else: {', '.join(reasons)}" if reasons else "")


def _sources(machine: Machine) -> list[str]:
    """Of a recorded machine: where each group of facts is from, and what was concluded."""
    return [
        f"{source.fields or 'all'}: {source.source}"
        + (f" (inferred: {source.inferred})" if source.inferred else "")
        for source in machine.sources
    ]


def wrapped(label: str, text: str) -> str:
    """A row of at most 100 columns; what has no blanks stays whole, and so do variables."""
    if label == "variable":
        return f"{label:<10}{text}"
    return textwrap.fill(
        text, 100, initial_indent=f"{label:<10}", subsequent_indent=" " * 10,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


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


def _known(fact: object) -> str:
    return f"unknown ({fact.why})" if isinstance(fact, Unknown) else str(fact)


def _plan(terminal: Terminal, machine: Machine, model: str, named: str | None) -> Plan | UserError:
    """What `serve` would do without flags, or the error with which it would refuse.

    Args:
        named: what `--machine` says; None for the machine at hand. Of another one its cards decide
            which kernels count.
    """
    try:
        with terminal.waiting("asking kernels what they take"):
            return _planned(machine, model, named)
    except UserError as error:
        return error


def _planned(machine: Machine, model: str, named: str | None) -> Plan:
    from metainfer.arch.families import read_arch
    from metainfer.kernels.tune_record import find_here
    from metainfer.plan.build import build_plan, choose_target
    from metainfer.plan.formats import terms_here
    from metainfer.plan.proof import cache_proof
    from metainfer.plan.settings import EngineSettings

    settings = EngineSettings()
    arch = read_arch(model)
    capabilities = _registry(machine, named).capabilities
    able = choose_target(machine, arch, settings, capabilities)
    terms = terms_here(machine, arch, settings, able)
    proof = cache_proof(Path(model_dir(model)), arch, settings, terms)
    tuning = find_here(machine, able.target).tuning()
    return build_plan(machine, arch, settings, able, proof, tuning)


def _registry(machine: Machine, named: str | None) -> Registry:
    from metainfer.cli.kernels_coverage import kinds_of
    from metainfer.kernels.builtin import builtin_registry
    from metainfer.kernels.on_paper import registry_for

    if named is None or isinstance(machine.gpus, Unknown) or not machine.gpus:
        return builtin_registry()
    return registry_for(next(iter(kinds_of(machine, named).values())))


VERB = Verb(
    "env",
    "Report on machine, versions and plan, to paste",
    (("what it is about", EnvOptions),),
    run,
    (
        "metainfer env",
        "metainfer env deepseek-v4-flash --json",
        "metainfer env deepseek-v4-flash --machine rtx-pro-6000-x8",
    ),
)
