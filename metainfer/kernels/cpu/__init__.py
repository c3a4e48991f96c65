"""Implementations for the CPU: vectorised torch, bounded memory, no dense masks."""

from metainfer.kernels.cpu import compress, hc, norm, rope
from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = tuple(
    backend for module in (norm, rope, hc, compress) for backend in module.BACKENDS
)
