"""Kernels in CUDA C++: compiled on demand by NVIDIA's run-time compiler, which needs no GPU.

The compiler (NVRTC) comes with torch's builds for CUDA; elsewhere the package nvidia-cuda-nvrtc
has it. No other tool and no header is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from metainfer.core.errors import MetainferError, UserError

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_FIRST_WITH_ITS_OWN = (9, 0)  # generation with instructions that later ones lack


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """One function of one file.

    Attributes:
        entry: the function; the file is called after it.
        threads: of a block.
        folder: where the file is, and what it includes.
    """

    entry: str
    threads: int
    folder: Path

    @property
    def __name__(self) -> str:
        return self.entry

    @property
    def cache_key(self) -> str:
        """Changes with all sources that the code may come from."""
        sources = sorted(self.folder.glob("*.cu*"))
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


@dataclass(frozen=True, slots=True)
class CudaUnit:
    """One piece of machine code, as `triton.record.CompileUnit` is one of Triton's.

    Attributes:
        constants: values of the macros that the source is compiled with, by name.
        shared_bytes: dynamic shared memory of a block.
    """

    kernel: CudaKernel
    constants: tuple[tuple[str, int], ...]
    shared_bytes: int

    @property
    def name(self) -> str:
        return self.kernel.entry

    @property
    def signature(self) -> tuple[str, ...]:
        return ()

    @property
    def divisible(self) -> tuple[int, ...]:
        return ()

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        return (("threads", self.kernel.threads), ("shared_bytes", self.shared_bytes))

    def facts(self) -> dict[str, str]:
        """What tells it from other units of its kernel."""
        return {name: f"is {value}" for name, value in (*self.constants, *self.options)}

    def compile(self, capability: tuple[int, int]) -> Any:
        """Machine code and PTX for GPUs of `capability`, with the names that Triton uses."""
        asm = _compile(self.kernel, self.constants, capability)
        metadata = SimpleNamespace(name=self.kernel.entry, shared=self.shared_bytes, tmem_size=0)
        return SimpleNamespace(asm={**asm, "ttir": ""}, metadata=metadata)


def unit_of(kernel: CudaKernel, shared_bytes: int, constants: Mapping[str, int]) -> CudaUnit:
    """What a launch compiles."""
    return CudaUnit(kernel, tuple(sorted(constants.items())), shared_bytes)


@cache
def compiler() -> ctypes.CDLL | str:
    """NVRTC, or one sentence that says why there is none."""
    found = importlib.util.find_spec("nvidia")
    roots = [] if found is None else list(found.submodule_search_locations or ())
    paths = [str(path) for root in roots for name in _NAMES for path in Path(root).rglob(name)]
    for path in (*paths, *_NAMES):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return "NVIDIA's run-time compiler is not installed (pip install nvidia-cuda-nvrtc)"


def _compile(
    kernel: CudaKernel, constants: tuple[tuple[str, int], ...], capability: tuple[int, int]
) -> dict[str, Any]:
    library = compiler()
    if isinstance(library, str):
        raise UserError(library)
    file = f"{kernel.entry}.cu"
    source = (kernel.folder / file).read_bytes()
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None),
    )
    # "a": with the instructions that this generation alone has.
    alone = "a" if capability >= _FIRST_WITH_ITS_OWN else ""
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}{alone}",
        f"--include-path={kernel.folder}",
        *(f"--define-macro={name}={value}" for name, value in constants),
    ]
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        code = library.nvrtcCompileProgram(program, len(options), words)
        if code:
            log = _text(library, program, "ProgramLog")
            raise MetainferError(f"{file} does not compile: {log.decode(errors='replace')}")
        ptx = _text(library, program, "PTX").rstrip(b"\0").decode()
        return {"cubin": _text(library, program, "CUBIN"), "ptx": ptx}
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise MetainferError(f"NVRTC: {library.nvrtcGetErrorString(code).decode()}")
