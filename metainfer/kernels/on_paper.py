"""Registries for machines that are not here: what would run on them, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.registry import Registry
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
    backend: which would run; "" where none that the order allows would.
    refused: those before it, and why each does not serve.
    """

    backend: str
    refused: tuple[tuple[str, str], ...]

    @property
    def is_slow(self) -> bool:
        """Nothing but a reference."""
        return self.backend in ("", REFERENCE)


def choose(registry: Registry, op: str, case: Any, target: Target, order: str = "") -> Choice:
    """What `Registry.bind` would take, without raising."""
    able = registry.capabilities(target)
    backends = registry.backends(op)
    refused = []
    for name in allowed(op, parse_order(order, able.backends), able.default_order_of(op)):
        if name not in backends:
            refused.append((name, NO_KERNEL))
            continue
        verdict = backends[name].eligible(case, target)
        if verdict:
            return Choice(name, tuple(refused))
        refused.append((name, verdict.reason))
    return Choice("", tuple(refused))
