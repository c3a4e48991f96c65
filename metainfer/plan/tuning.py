"""Tuning: whether layers bind what `metainfer kernels tune` found to be fastest on this card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.core.errors import UserError
from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Tuning:
    """Attributes:
    operations: whose times were kept for exactly this card and these versions.
    reason: when they were found, or why there are none.
    """

    operations: int
    reason: str


def default_cache() -> Path:
    """Where `kernels tune` keeps what it found."""
    return Path.home() / ".cache" / "metainfer" / "tune"


def tuned_kernels(settings: EngineSettings, tuning: Tuning | None) -> Value[str]:
    """ "on": implementations are chosen by times that were kept, "off": by the default order."""
    if settings.tuned_kernels is False:
        return Value("off", Origin.FLAG, "given with --no-tuned-kernels")
    if settings.code_for is not None:
        if settings.tuned_kernels:
            raise UserError(
                f"--tuned-kernels: times are kept of native code, not of that of"
                f" {settings.code_for}",
                hint="leave --tuned-kernels or --as out",
            )
        return Value("off", Origin.DEFAULT, "times are kept of native code alone")
    if tuning is not None and tuning.operations:
        return Value("on", Origin.MEASURED, tuning.reason)
    reason = "what was kept for this card counts"
    if tuning is not None:
        reason = f"{tuning.reason}; `metainfer kernels tune` does it"
    origin = Origin.FLAG if settings.tuned_kernels else Origin.DEFAULT
    return Value("on", origin, reason)
