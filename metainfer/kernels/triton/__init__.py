"""Kernels in Triton, for every target in `launch.TARGETS`."""

from metainfer.kernels.registry import Backend
from metainfer.kernels.triton import (
    attention_decode,
    attention_merge,
    attention_prefill,
    cache,
    compress,
    hc,
    hc_fp8,
    index,
    index_codes,
    linear,
    moe,
    norm,
    quantise,
    rope,
    route,
    sample,
    step,
)
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher

DECLARED: tuple[Declared, ...] = (
    *norm.BACKENDS,
    *rope.BACKENDS,
    *quantise.BACKENDS,
    *linear.BACKENDS,
    *hc.BACKENDS,
    *hc_fp8.BACKENDS,
    *compress.BACKENDS,
    *cache.BACKENDS,
    *index_codes.BACKENDS,
    *index.BACKENDS,
    *attention_prefill.BACKENDS,
    *attention_decode.BACKENDS,
    *attention_merge.BACKENDS,
    *route.BACKENDS,
    *moe.BACKENDS,
    *sample.BACKENDS,
    *step.BACKENDS,
)


def triton_backends(launch: Launcher) -> tuple[Backend, ...]:
    """All backends of this package, started by `launch`."""
    return tuple(declared.bind(launch) for declared in DECLARED)
