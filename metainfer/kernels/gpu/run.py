"""Programs: kernels in CUDA C++, loaded at their first start and kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from metainfer.kernels.gpu.code_cache import CUBIN, PTX, code_of
from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.gpu.driver import Driver
from metainfer.kernels.gpu.program import CudaUnit


class Programs:
    """Compiles for `capability`, starts on torch's current device and stream. The first start of a
    unit loads it, and compiles what is not on disk, which a CUDA graph cannot capture; later ones
    can be captured."""

    def __init__(
        self,
        capability: tuple[int, int],
        compilations: Compilations | None = None,
        driver: Driver | None = None,
        *,
        portable: bool = False,
    ) -> None:
        """
        Args:
            driver: NVIDIA's on this machine where none is given.
            portable: load PTX, which the driver translates for the GPU at hand.
        """
        self._capability = capability
        self._compilations = compilations or Compilations()
        self._driver = driver
        self._kind = PTX if portable else CUBIN
        self._functions: dict[tuple[int, CudaUnit], int] = {}

    def start(self, unit: CudaUnit, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """As `Launcher.cuda` describes the arguments."""
        if self._driver is None:
            self._driver = Driver()
        stream = torch.cuda.current_stream()
        key = stream.device_index, unit
        self._driver.enter(stream.device_index)
        if key not in self._functions:
            code = code_of(unit, self._capability, self._kind)
            function = self._driver.load(code, unit.name)
            self._driver.allow_shared(function, unit.shared_bytes)
            self._functions[key] = function
            self._compilations.note(unit.name, unit.facts())
        self._driver.launch(
            self._functions[key],
            grid,
            unit.kernel.threads,
            unit.shared_bytes,
            stream.cuda_stream,
            [_packed(argument) for argument in arguments],
        )


def _packed(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_uint64(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)
