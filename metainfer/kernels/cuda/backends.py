"""All backends in CUDA C++."""

from __future__ import annotations

from metainfer.kernels.cuda import few_rows, grouped_fp4, sparse_prefill
from metainfer.kernels.registry import Backend
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher

DECLARED: tuple[Declared, ...] = (
    *sparse_prefill.BACKENDS,
    *grouped_fp4.BACKENDS,
    *few_rows.BACKENDS,
)


def cuda_backends(launch: Launcher) -> tuple[Backend, ...]:
    """All backends of this package, started by `launch`."""
    return tuple(declared.bind(launch) for declared in DECLARED)
