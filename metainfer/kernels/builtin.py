"""The registry of the backends that come with metainfer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from metainfer.kernels.composed import BACKENDS as COMPOSED_BACKENDS
from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.native import native_backends
from metainfer.kernels.native.library import load_library
from metainfer.kernels.open import BACKENDS as OPEN_BACKENDS
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Backend, Registry

if TYPE_CHECKING:
    from metainfer.kernels.triton.launch import Launcher

_log = logging.getLogger(__name__)


def builtin_registry(launch: Launcher | None = None) -> Registry:
    """All backends of this package; compiles those in C where that was not done before, and says
    so in the log where that cannot be.

    Args:
        launch: what starts the kernels for GPUs; None for the GPU that torch sees. Where it sees
            none, there are no such backends.
    """
    library = load_library()
    if isinstance(library, str):
        _log.warning("steps of few rows will be slower: %s", library)
    return Registry(
        (
            *_gpu_backends(launch),
            *native_backends(library),
            *CPU_BACKENDS,
            *COMPOSED_BACKENDS,
            *OPEN_BACKENDS,
            *REFERENCE_BACKENDS,
        )
    )


def _gpu_backends(launch: Launcher | None) -> tuple[Backend, ...]:
    if launch is None and not torch.cuda.is_available():
        return ()
    # Triton takes a while to import, and needs not be installed where there is no GPU.
    from metainfer.kernels.cuda.backends import cuda_backends
    from metainfer.kernels.torch_products import torch_backends
    from metainfer.kernels.triton import triton_backends
    from metainfer.kernels.triton.launch import JitLauncher

    launch = launch or JitLauncher()
    return (*cuda_backends(launch), *triton_backends(launch), *torch_backends(launch))
