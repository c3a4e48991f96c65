"""Implementations for the CPU: vectorised torch, bounded memory, no dense masks."""

from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = ()
