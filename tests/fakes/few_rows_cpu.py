"""few_rows.cu on the CPU: its source compiled by a C++ compiler, with what a GPU does itself
written in C++."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

from metainfer.kernels.cuda import few_rows

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


class CpuLauncher:
    """Runs launches at once, those of few_rows alone.

    Args:
        folder: for compiled code.
    """

    interpreted = False
    portable = False

    def __init__(self, capability: tuple[int, int], multiprocessors: int, folder: Path) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors
        self._folder = folder

    def cuda(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        shared_bytes: int,
        **constants: int,
    ) -> None:
        assert kernel.entry == "few_rows"
        assert shared_bytes == 4 * constants["WARPS"] * 8 * constants["NT"] * 20
        if 0 in grid:
            return
        tensors, numbers = arguments[:5], arguments[5:]
        # What the GPU would have to load by 16 bytes must lie so.
        assert all(tensors[place].data_ptr() % 16 == 0 for place in (0, 2))
        pointers = [None if x is None else ctypes.c_void_p(x.data_ptr()) for x in tensors]
        start = ctypes.CDLL(str(self._library(constants))).start
        start(grid[0], grid[1], *pointers, (ctypes.c_int64 * len(numbers))(*numbers))

    def _library(self, constants: dict[str, int]) -> Path:
        macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
        name = hashlib.sha256(" ".join(macros).encode()).hexdigest()[:16]
        library = self._folder / f"{name}.so"
        if not library.exists():
            sources = few_rows.KERNELS[constants["WARPS"]].folder
            assert COMPILER is not None
            command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", *macros]
            command += [f"-I{sources}", str(HERE / "few_rows_cpu.cpp"), "-o", str(library)]
            subprocess.run(command, check=True)
        return library
