"""Programs: kernels in CUDA C++, loaded at their first start and kept."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from metainfer.kernels.gpu.code_cache import CUBIN, PTX, code_of
from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.gpu.driver import Driver
from metainfer.kernels.gpu.program import CudaKernel, CudaUnit, unit_of


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
        # The same by what a start says, in the order in which it says it: to sort it, and to make a
        # unit, takes longer than to start it.
        self._started: dict[tuple[Any, ...], int] = {}

    def start(
        self,
        kernel: CudaKernel,
        shared_bytes: int,
        constants: Mapping[str, int],
        grid: Sequence[int],
        arguments: Sequence[Any],
    ) -> None:
        """As `Launcher.cuda` describes the arguments."""
        if self._driver is None:
            self._driver = Driver()
        stream = torch.cuda.current_stream()
        device = stream.device_index
        self._driver.enter(device)
        key = device, kernel.entry, kernel.threads, kernel.folder, shared_bytes, *constants.items()
        function = self._started.get(key)
        if function is None:
            unit = unit_of(kernel, shared_bytes, constants)
            function = self._started[key] = self._load(self._driver, device, unit)
        self._driver.launch(
            function,
            grid,
            kernel.threads,
            shared_bytes,
            stream.cuda_stream,
            packed(arguments),
        )

    def _load(self, driver: Driver, device: int, unit: CudaUnit) -> int:
        """`unit` on the current device, from the first start on."""
        if (device, unit) not in self._functions:
            code = code_of(unit, self._capability, self._kind)
            function = driver.load(code, unit.name)
            driver.allow_shared(function, unit.shared_bytes)
            self._functions[device, unit] = function
            self._compilations.note(unit.name, unit.facts())
        return self._functions[device, unit]


def packed(arguments: Sequence[Any]) -> bytes:
    """As `Driver.launch` takes them. (An object of ctypes for each would take three times as long
    in all.)"""
    form, values = ["<"], []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            form.append("Q")
            values.append(argument.data_ptr())
        elif argument is None:
            form.append("8x")
        else:
            form.append("f4x" if isinstance(argument, float) else "q")
            values.append(argument)
    return struct.pack("".join(form), *values)
