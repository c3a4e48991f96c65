"""A GPU that is not here, as Triton's run time sees it: kernels are bound and looked up as on one,
nothing is compiled and nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_numbers = count(1000)  # of devices: Triton keeps what it compiled for each


class Start(NamedTuple):
    """One start, as the launcher of a compiled kernel is told of it.

    Attributes:
        compiled: the code.
        grid: of three numbers.
        arguments: constants among them.
    """

    compiled: CompiledNothing
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]


class NoGpu:
    """Takes the place of Triton's driver.

    Attributes:
        starts: that were made, in order.
        compiled: the kernels that were compiled, in order.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.device, self.stream = next(_numbers), 7
        self.starts: list[Start] = []
        self.compiled: list[CompiledNothing] = []
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def compile(self, source: Any, target: Any, options: Any, **_: Any) -> CompiledNothing:
        self.compiled.append(CompiledNothing(self, source))
        return self.compiled[-1]


class CompiledNothing:
    """As Triton's `CompiledKernel`, with no code."""

    def __init__(self, gpu: NoGpu, source: Any) -> None:
        self.src = source
        self.function, self.packed_metadata = object(), object()
        self._gpu = gpu

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: object,
        metadata: object,
        launch_metadata: object,
        enter_hook: Any,
        exit_hook: Any,
        *arguments: Any,
    ) -> None:
        assert function is self.function
        assert metadata is self.packed_metadata
        if enter_hook is not None:
            enter_hook(launch_metadata)
        self._gpu.starts.append(Start(self, (x, y, z), stream, arguments))


@contextmanager
def no_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[NoGpu]:
    """Within it, Triton believes that it has one."""
    gpu = NoGpu(capability)
    with (
        mock.patch.object(driver, "_active", gpu),
        mock.patch.object(triton.compiler, "compile", gpu.compile),
    ):
        yield gpu
