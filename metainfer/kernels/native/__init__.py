"""Implementations for the CPU in C, for steps of few rows: one call where torch needs ten.

Compiled on demand; where there is no C compiler no case is eligible, and the reason says so.
Steps of many rows go to the backends of `kernels.cpu`, with the weights as those prepare them.
"""

from __future__ import annotations

from metainfer.kernels.native import attention, hc, linear, moe, norm
from metainfer.kernels.native.backend import Native
from metainfer.kernels.native.library import Library
from metainfer.kernels.registry import Backend


def native_backends(library: Library | str) -> tuple[Backend, ...]:
    """All backends over `library`, or over none: then it is the reason why."""
    native = Native(library)
    modules = (norm, linear, hc, attention, moe)
    return tuple(backend for module in modules for backend in module.backends(native))
