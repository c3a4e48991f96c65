"""The registry of the backends that come with metainfer."""

from __future__ import annotations

import logging

from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.native import native_backends
from metainfer.kernels.native.library import load_library
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry

_log = logging.getLogger(__name__)


def builtin_registry() -> Registry:
    """All backends of this package; compiles those in C where that was not done before, and says
    so in the log where that cannot be."""
    library = load_library()
    if isinstance(library, str):
        _log.warning("steps of few rows will be slower: %s", library)
    return Registry((*native_backends(library), *CPU_BACKENDS, *REFERENCE_BACKENDS))
