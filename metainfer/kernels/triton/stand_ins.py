"""Triton's own just-in-time compiler asked for a unit without a GPU: arguments that stand in for
real ones, and a driver that stands in for NVIDIA's. What it leaves on disk is what a launch of the
real arguments looks for."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from metainfer.kernels.triton.record import CompileUnit, type_of_pointer

_INTEGERS = {"i1": 0, "i8": 0, "i16": 0, "i32": 0, "i64": 2**40, "u64": 2**63}


class Address:
    """A tensor as the compiler sees it: a type, and whether 16 divides its address."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


def arguments_of(unit: CompileUnit) -> dict[str, Any]:
    """Arguments by name, for which the compiler makes this unit."""
    constants = dict(unit.constants)
    made = {}
    for place, name in enumerate(unit.kernel.arg_names):
        kind, aligned = unit.signature[place], place in unit.divisible
        if place in constants:
            made[name] = constants[place]
        elif kind.startswith("*"):
            made[name] = Address(type_of_pointer(kind), aligned)
        elif kind in _INTEGERS:
            made[name] = _INTEGERS[kind] + (16 if aligned else 7)
        else:
            made[name] = True if kind == "u1" else 1.5
    return made


class _Driver:
    """Of one GPU that is not there."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def use_stand_in_driver(capability: tuple[int, int]) -> None:
    """For all that this process compiles."""
    triton.runtime.driver.set_active(_Driver(capability))


def compile_as_jit(unit: CompileUnit) -> Any:
    """Triton's compiled kernel, left on disk; after `use_stand_in_driver`. What starts it is
    compiled too, where that is a file of its own (before Triton 3.9)."""
    arguments = {**arguments_of(unit), **dict(unit.options)}
    compiled = unit.kernel.warmup(grid=(1,), **arguments)
    # Needs a C compiler and NVIDIA's driver; the first start makes it where this cannot.
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    return compiled
