"""Launcher: the one way in which kernels of this package are started.

A backend computes its grid and constants from the case and the shapes of its arguments, never from
their contents, and hands them to the launcher that it was made with. Whoever made the launcher
decides what a launch does: run natively or in Triton's interpreter (`JitLauncher`), run the code of
an older GPU from its PTX (`portable.PtxLauncher`), or only note what would be compiled
(`record.RecordingLauncher`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
import triton

from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.gpu.program import CudaKernel
from metainfer.kernels.gpu.run import Programs
from metainfer.kernels.triton.started import Starts, key_of

Grid = tuple[int, ...]

SHARED_BYTES: Mapping[tuple[int, int], int] = MappingProxyType(
    {
        (8, 0): 163 * 1024,
        (8, 6): 99 * 1024,
        (8, 9): 99 * 1024,
        (9, 0): 227 * 1024,
        (10, 0): 227 * 1024,
        (12, 0): 99 * 1024,
    }
)
"""Shared memory that one block may use, by compute capability (CUDA C++ Programming Guide, table of
technical specifications)."""

TARGETS: tuple[tuple[int, int], ...] = tuple(SHARED_BYTES)
"""Compute capabilities that kernels are written and compiled for."""


class Launcher(Protocol):
    """Starts kernels for one kind of GPU.

    Attributes:
        capability: of the code that runs, which may be older than the GPU.
        multiprocessors: of the GPU; what splits work over programs counts with it.
        interpreted: kernels run in Triton's interpreter, which multiplies bf16 wrongly: widen
            operands to fp32 before `tl.dot` then.
        portable: the code runs from its PTX, and the GPU may be newer: libraries, which would run
            that GPU's own code, are not used.
    """

    capability: tuple[int, int]
    multiprocessors: int
    interpreted: bool
    portable: bool

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        *arguments: Any,
        num_warps: int = 4,
        num_stages: int = 1,
        **constants: Any,
    ) -> None:
        """Start `kernel` over `grid`; nothing happens where the grid is empty.

        Args:
            arguments: tensors, numbers and None, in the order of the kernel's parameters.
            constants: its `tl.constexpr` parameters by name.
        """

    def cuda(
        self,
        kernel: CudaKernel,
        grid: Grid,
        *arguments: Any,
        shared_bytes: int,
        **constants: int,
    ) -> None:
        """Start a kernel in CUDA C++ over `grid`; nothing happens where the grid is empty.

        Args:
            arguments: tensors and None (pointers), integers (of 64 bits) and floats (of 32), in
                the order of the function's parameters.
            shared_bytes: dynamic shared memory of a block.
            constants: macros of the source.
        """


class JitLauncher:
    """Runs kernels through Triton's own just-in-time compiler, or its interpreter where the
    process was started with TRITON_INTERPRET=1 (then on tensors of the CPU)."""

    def __init__(
        self,
        capability: tuple[int, int] | None = None,
        multiprocessors: int | None = None,
        compilations: Compilations | None = None,
    ) -> None:
        """The current CUDA device's numbers where none are given.

        Args:
            compilations: told of every kernel that is started for the first time.
        """
        self.interpreted = bool(triton.knobs.runtime.interpret)
        self.portable = False
        if capability is None or multiprocessors is None:
            device = torch.cuda.get_device_properties()
            capability = capability or (device.major, device.minor)
            multiprocessors = multiprocessors or device.multi_processor_count
        self.capability = capability
        self.multiprocessors = multiprocessors
        self._compilations = compilations or Compilations()
        self._programs = Programs(capability, self._compilations)
        self._starts = Starts()
        self._started: set[int] = set()  # ids of compiled kernels, which Triton keeps

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        *arguments: Any,
        num_warps: int = 4,
        num_stages: int = 1,
        **constants: Any,
    ) -> None:
        if 0 in grid:
            return
        constants["num_warps"], constants["num_stages"] = num_warps, num_stages
        key = None if self.interpreted else key_of(kernel, arguments, constants)
        if key is not None and self._starts.again(key, grid, arguments):
            return
        started = kernel[grid](*arguments, **constants)
        if started is None:
            return
        if key is not None:
            self._starts.keep(key, kernel, arguments, constants, started)
        if id(started) not in self._started:
            self._started.add(id(started))
            self._compilations.note(kernel.__name__, facts_of(kernel, arguments, constants))

    def cuda(
        self,
        kernel: CudaKernel,
        grid: Grid,
        *arguments: Any,
        shared_bytes: int,
        **constants: int,
    ) -> None:
        if 0 not in grid:
            self._programs.start(kernel, shared_bytes, constants, grid, arguments)


def facts_of(kernel: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, str]:
    """What tells the code of a launch from other code of its kernel."""
    from metainfer.kernels.triton.record import unit_of  # which needs this module

    if not isinstance(kernel, triton.runtime.JITFunction):
        return {name: f"is {value}" for name, value in named.items()}
    return unit_of(kernel, arguments, named)[0].facts()


def cdiv(number: int, size: int) -> int:
    """Pieces of `size` that hold `number`. Triton's own, which kernels may call too, take ten times
    as long on the host, where a step asks hundreds of times; so with the next."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The least that is not below `number`; 0 of 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one block may use; of the nearest older GPU for one that is not
    in the table."""
    known = [older for older in SHARED_BYTES if older <= capability]
    return SHARED_BYTES[max(known)] if known else 48 * 1024


def has_fp8(launch: Launcher) -> bool:
    """Whether the code may use e4m3 as a type; older GPUs decode its bytes with integers."""
    return launch.capability >= (8, 9)
