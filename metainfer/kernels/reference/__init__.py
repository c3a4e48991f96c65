"""Plain implementations: the formula of each op in torch, for any device, meant to be read."""

from metainfer.kernels.reference import (
    attention,
    cache,
    compress,
    hc,
    index,
    linear,
    moe,
    norm,
    quantise,
    rope,
    sample,
    step,
)
from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = tuple(
    backend
    for module in (
        norm,
        rope,
        quantise,
        linear,
        hc,
        compress,
        index,
        attention,
        cache,
        moe,
        sample,
        step,
    )
    for backend in module.BACKENDS
)
