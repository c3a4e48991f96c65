"""Versions: pairs of driver, libraries and cards that others found to be bad."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.doctor.known import Pair, read_pairs, versions_of
from metainfer.hardware.machine import Machine, gpus_of

_NAME = "versions"


def versions(patient: Patient) -> Iterator[Finding]:
    machine = patient.machine
    if not gpus_of(machine):
        return
    bad = [(pair, found) for pair in read_pairs() if (found := _holding(pair, machine))]
    for pair, found in bad:
        yield Finding(
            _NAME, Level(pair.level), pair.name, found, pair.matters, pair.fix, pair.source
        )
    if bad:
        return
    there = versions_of(machine)
    if there:
        listed = ", ".join(f"{name} {version}" for name, version in there.items())
        yield Finding(_NAME, Level.OK, "no pair of versions here is known to be bad", listed)
    else:
        yield Finding(_NAME, Level.UNKNOWN, "versions are not recorded", "driver and packages",
                      fix="run `metainfer probe --out machine.json` where the engine runs"
                      )  # fmt: skip


def _holding(pair: Pair, machine: Machine) -> str:
    """What is there, where all of a pair holds; "" else."""
    if not pair.cards.among(machine):
        return ""
    found = [one.holding(machine) for one in pair.when]
    return ", ".join(found) if all(found) else ""


CHECKS = (Check(_NAME, "Are versions together that are known to be bad?", versions),)
