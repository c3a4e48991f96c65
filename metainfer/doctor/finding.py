"""Findings: what a check says of a machine, a model and a plan, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from metainfer.arch.record import Arch
from metainfer.arch.shapes import ModelShape
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.hardware.ports import Port
from metainfer.plan.plan import Plan


class Level(StrEnum):
    """How bad it is; the order is that of exit codes."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    Attributes:
        check: which check says it.
        what: the finding in a sentence.
        evidence: the facts that it rests on, with their numbers.
        matters: why, in tok/s or GB where that can be estimated; "" where it is fine.
        fix: exactly what to do; "" where there is nothing to do.
        source: where the figures that were not read off the machine are from.
    """

    check: str
    level: Level
    what: str
    evidence: str
    matters: str = ""
    fix: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined. Anything but the machine may be missing; checks that need it are silent.

    Attributes:
        coverage: reports of kernel coverage as `kernels coverage --json` prints them, by ranks of
            tensor parallelism, or why there are none; where nothing was compiled a report's rows
            have no code ("compiled" is false).
        shape: of the model, served or not.
        port: who listens where a server is to be.
    """

    machine: Machine
    arch: Arch | None = None
    plan: Plan | None = None
    coverage: Mapping[int, Mapping[str, Any]] | Unknown | None = None
    shape: ModelShape | None = None
    port: Port | Unknown | None = None


Examine = Callable[[Patient], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name. `question`: what it answers, for the list of checks."""

    name: str
    question: str
    examine: Examine


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is well or unknown, 1 with warnings, 2 with failures."""
    levels = {finding.level for finding in findings}
    if Level.FAIL in levels:
        return 2
    return 1 if Level.WARN in levels else 0
