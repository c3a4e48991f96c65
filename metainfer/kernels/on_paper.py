"""Registries for machines that are not here: what would run on them, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.registry import Registry, no, told_parts
from metainfer.kernels.tuned import Part, at_rows, backend_of
from metainfer.ops.base import Target
from metainfer.ops.kernel_order import NO_KERNEL, REFERENCE, allowed, parse_order
from metainfer.ops.targets import CardKind


def has_triton() -> bool:
    """Whether it is installed. Raises UserError: it is, but cannot be imported."""
    if find_spec("triton") is None:
        return False
    try:
        import_module("triton")
    except ImportError as error:
        raise UserError(
            f"triton is installed but cannot be imported: {error}",
            hint="pip install --force-reinstall 'metainfer[kernels]'",
        ) from error
    return True


def registry_for(kind: CardKind | None) -> Registry:
    """Backends as they are on a kind of card, or on this machine's CPU; without Triton those for
    GPUs are missing."""
    if kind is None or not has_triton():
        return builtin_registry()
    from metainfer.kernels.triton.record import RecordingLauncher

    return builtin_registry(RecordingLauncher(kind.capability, kind.multiprocessors))


@dataclass(frozen=True, slots=True)
class Choice:
    """Attributes:
    backend: which would run calls of most rows; "" where none that the order allows would.
    refused: those before it, and why each does not serve.
    parts: which would run calls of how many rows; () where none would.
    why: who chose.
    """

    backend: str
    refused: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...] = ()
    why: str = ""

    @property
    def is_slow(self) -> bool:
        """Nothing but a reference."""
        return self.backend in ("", REFERENCE)

    @property
    def runs_on(self) -> str:
        """As `Kernel.runs_on`."""
        return told_parts(self.parts)

    def at(self, rows: int) -> str:
        """What would run a call of so many rows: a backend or a variant of one."""
        return at_rows(self.parts, rows)


def choose(registry: Registry, op: str, case: Any, target: Target, order: str = "") -> Choice:
    """What `Registry.bind` would take, without raising where nothing serves."""
    able = registry.capabilities(target)
    backends = registry.backends(op)
    chosen = registry.choose(op, case, target, order)
    backend = "" if chosen is None else backend_of(chosen.parts[-1].candidate)
    refused = []
    for name in allowed(op, parse_order(order, able.backends), able.default_order_of(op)):
        if name == backend:
            break
        verdict = registry.verdict(op, name, case, target) if name in backends else no(NO_KERNEL)
        if not verdict:
            refused.append((name, verdict.reason))
    if chosen is None:
        return Choice("", tuple(refused))
    return Choice(backend, tuple(refused), chosen.parts, chosen.why)
