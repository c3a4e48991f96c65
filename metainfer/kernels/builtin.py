"""The registry of the backends that come with metainfer."""

from __future__ import annotations

from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry


def builtin_registry() -> Registry:
    """All backends of this package."""
    return Registry((*CPU_BACKENDS, *REFERENCE_BACKENDS))
