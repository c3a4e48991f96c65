"""All checks, found in `doctor.checks`, run over one patient."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from metainfer.doctor import checks
from metainfer.doctor.finding import Check, Finding, Level, Patient

_WORST_FIRST = (Level.FAIL, Level.WARN, Level.UNKNOWN, Level.OK)


def all_checks() -> tuple[Check, ...]:
    """Every `CHECKS` of the modules in `doctor.checks`, in the order of their names: a file there
    is all that a new check needs."""
    found: list[Check] = []
    for module in sorted(pkgutil.iter_modules(checks.__path__), key=lambda info: info.name):
        loaded = importlib.import_module(f"{checks.__name__}.{module.name}")
        found += loaded.CHECKS
    return tuple(found)


def examine(
    patient: Patient, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Finding, ...]:
    """What all checks find, the worst first.

    Args:
        on_progress: told how many of how many checks are done.
    """
    checks = all_checks()
    found: list[Finding] = []
    for done, check in enumerate(checks):
        if on_progress is not None:
            on_progress(done, len(checks))
        found += check.examine(patient)
    return tuple(sorted(found, key=lambda finding: _WORST_FIRST.index(finding.level)))
