"""Kernels in Triton, for every target in `launch.TARGETS`."""

from metainfer.kernels.registry import Backend
from metainfer.kernels.triton import attention_merge
from metainfer.kernels.triton import attention_prefill, cache, index_codes, norm, quantise, rope
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher

DECLARED: tuple[Declared, ...] = (
    *norm.BACKENDS,
    *rope.BACKENDS,
    *quantise.BACKENDS,
    *cache.BACKENDS,
    *index_codes.BACKENDS,
    *attention_prefill.BACKENDS,
)


def triton_backends(launch: Launcher) -> tuple[Backend, ...]:
    """All backends of this package, started by `launch`."""
    return tuple(declared.bind(launch) for declared in DECLARED)
