"""The registry of the backends that come with metainfer."""

from __future__ import annotations

from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.native import native_backends
from metainfer.kernels.native.library import load_library
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry


def builtin_registry() -> Registry:
    """All backends of this package; compiles those in C where that was not done before."""
    return Registry((*native_backends(load_library()), *CPU_BACKENDS, *REFERENCE_BACKENDS))
