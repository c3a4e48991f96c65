"""Implementations for the CPU: vectorised torch, bounded memory, no dense masks."""

from metainfer.kernels.cpu import (
    attention,
    cache,
    compress,
    hc,
    index,
    linear,
    moe,
    norm,
    rope,
    sample,
)
from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = tuple(
    backend
    for module in (norm, rope, linear, hc, compress, cache, index, attention, moe, sample)
    for backend in module.BACKENDS
)
