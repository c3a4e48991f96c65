"""Code of CUDA C++ units on disk, so that the second start compiles nothing: one file per unit,
target and kind of code, named after all that the code depends on."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from pathlib import Path

from metainfer.core.files import replace_file, require_ours
from metainfer.kernels.gpu.program import CudaUnit, compiler

CUBIN, PTX = "cubin", "ptx"


def default_folder() -> Path:
    return Path.home() / ".cache" / "metainfer" / "cuda"


def code_of(
    unit: CudaUnit, capability: tuple[int, int], kind: str, folder: Path | None = None
) -> str | bytes:
    """Machine code (CUBIN) or PTX text, from disk or compiled and kept there. A folder that cannot
    be written, or that others can write, keeps nothing.

    Raises UserError where NVIDIA's compiler is not installed, MetainferError for what does not
    compile.
    """
    folder = folder or default_folder()
    path = folder / f"{_key(unit, capability)}.{kind}"
    with contextlib.suppress(OSError):
        _require_ours(folder)
        kept = path.read_bytes()
        return kept.decode() if kind == PTX else kept
    code: str | bytes = unit.compile(capability).asm[kind]
    with contextlib.suppress(OSError):
        _require_ours(folder)
        replace_file(path, code.encode() if isinstance(code, str) else code)
    return code


def is_kept(
    unit: CudaUnit, capability: tuple[int, int], folder: Path | None = None, kind: str = CUBIN
) -> bool:
    """Whether code of `unit` is on disk."""
    return ((folder or default_folder()) / f"{_key(unit, capability)}.{kind}").exists()


def _key(unit: CudaUnit, capability: tuple[int, int]) -> str:
    parts = (_version(), unit.kernel.cache_key, repr((unit.name, unit.constants, capability)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _version() -> str:
    """Of the compiler; "" where there is none."""
    library = compiler()
    if isinstance(library, str):
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _require_ours(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    require_ours(folder)
