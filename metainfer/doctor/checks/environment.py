"""Environment: variables of NCCL, CUDA and PyTorch that were inherited and hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.hardware.topology import p2p_everywhere, way
from metainfer.hardware.visible import shown_by

_NAME = "inherited environment"


@dataclass(frozen=True, slots=True)
class _Rule:
    """Attributes:
    variable: its name.
    hurts: of a value, on a machine.
    matters, fix, source: as in a finding.
    """

    variable: str
    hurts: Callable[[str, Machine], bool]
    matters: str
    fix: str
    source: str


def _on(value: str, machine: Machine) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no")


def _off_where_peers_work(value: str, machine: Machine) -> bool:
    return _on(value, machine) and p2p_everywhere(machine) is True


def _keeps_pairs_apart(value: str, machine: Machine) -> bool:
    """A level below that at which some pair meets; levels above switches are NCCL's own check."""
    most = _REACH.get(value.strip().upper())
    if most is None or p2p_everywhere(machine) is False:
        return False
    places = range(len(gpus_of(machine)))
    ways = [way(machine, a, b) for a in places for b in places if a < b]
    return any(isinstance(one, Unknown) or one.kind not in most for one in ways)


_REACH = {
    **dict.fromkeys(("LOC", "0", "NVL", "NVB", "C2C"), frozenset[str]()),
    **dict.fromkeys(("PIX", "1"), frozenset({"PIX"})),
}
"""Kinds of ways that low levels take, by name and old number (paths.cc of NCCL)."""


def _hides_cards(value: str, machine: Machine) -> bool:
    gpus = gpus_of(machine)
    return len(shown_by(value, gpus).places) < len(gpus)


_RULES = (
    _Rule(
        "NCCL_P2P_DISABLE",
        _off_where_peers_work,
        "peers that work are not used: 70 in place of 90 tok/s for one request were reported, and"
        " a comparison of engines was wrong because a container had inherited it",
        "unset NCCL_P2P_DISABLE",
        "github.com/local-inference-lab/rtx6kpro, pcie-bandwidth; sgl-project/sglang/pull/29580",
    ),
    _Rule(
        "NCCL_SHM_DISABLE",
        _on,
        "where cards have no peer access nothing is left but sockets",
        "unset NCCL_SHM_DISABLE",
        "documentation of NCCL",
    ),
    _Rule(
        "NCCL_P2P_LEVEL",
        _keeps_pairs_apart,
        "pairs that meet above a switch go through host memory",
        "set NCCL_P2P_LEVEL=SYS, or PHB where sockets are slow, and measure",
        "github.com/local-inference-lab/rtx6kpro, pcie-bandwidth",
    ),
    _Rule(
        "NCCL_NVLS_ENABLE",
        lambda value, machine: _on(value, machine) and machine.nvlink is False,
        "it is made for NVLink switches; here it does nothing or fails at start",
        "unset NCCL_NVLS_ENABLE",
        "documentation of NCCL",
    ),
    _Rule(
        "NCCL_MAX_NCHANNELS",
        lambda value, machine: value.strip().isdigit() and int(value) < 8,
        "large messages are carried by too few channels: 22 in place of 38 GB/s over eight cards",
        "unset it, or set NCCL_MIN_NCHANNELS=8, and measure",
        "github.com/local-inference-lab/rtx6kpro, pcie-bandwidth",
    ),
    _Rule(
        "NCCL_DEBUG",
        lambda value, machine: value.strip().upper() == "TRACE",
        "every call writes lines",
        "unset NCCL_DEBUG, or set it to WARN",
        "documentation of NCCL",
    ),
    _Rule(
        "CUDA_VISIBLE_DEVICES",
        _hides_cards,
        "programs started from here see fewer cards than are examined, and `metainfer plan` plans"
        " for no more; those behind the first entry that names no card are hidden too",
        "unset CUDA_VISIBLE_DEVICES, unless the other cards are meant for something else",
        "CUDA C++ Programming Guide",
    ),
    _Rule(
        "CUDA_LAUNCH_BLOCKING",
        _on,
        "the host waits for every kernel: decode takes several times as long",
        "unset CUDA_LAUNCH_BLOCKING",
        "CUDA C++ Programming Guide",
    ),
    *(
        _Rule(
            variable,
            lambda value, machine: "expandable_segments:true" in value.replace(" ", "").lower(),
            "memory of expandable segments has no IPC handles: custom collectives of vLLM and"
            " SGLang switch themselves off, or fail, between processes",
            "unset it for engines that share memory between processes",
            "github.com/local-inference-lab/rtx6kpro, pcie-oneshot-allreduce",
        )
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ),
    _Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _on,
        "every tensor is allocated by the driver, which waits for the device",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        "documentation of PyTorch",
    ),
    _Rule(
        "TRITON_INTERPRET",
        _on,
        "kernels run in an interpreter, thousands of times slower",
        "unset TRITON_INTERPRET",
        "documentation of Triton",
    ),
)


def inherited(patient: Patient) -> Iterator[Finding]:
    """Each variable by a rule of its own; a CPU has none of these worries."""
    machine = patient.machine
    if isinstance(machine.gpus, Unknown) or not machine.gpus:
        return
    hurting = [
        rule
        for rule in _RULES
        if rule.variable in machine.environment
        and rule.hurts(machine.environment[rule.variable], machine)
    ]
    for rule in hurting:
        yield Finding(
            _NAME,
            Level.WARN,
            f"{rule.variable} is set, and hurts here",
            f"{rule.variable}={machine.environment[rule.variable]}",
            rule.matters,
            rule.fix,
            rule.source,
        )
    if not hurting:
        names = ", ".join(machine.environment) or "none is set"
        yield Finding(_NAME, Level.OK, "no inherited variable is known to hurt", names)


CHECKS = (Check(_NAME, "Does this process inherit variables that hurt?", inherited),)
