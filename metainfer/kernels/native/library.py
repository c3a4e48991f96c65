"""The C library: compiled once per sources, flags and CPU, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from metainfer.core.env import child_environment
from metainfer.core.files import require_ours
from metainfer.core.threads import signals_held

_HERE = Path(__file__).parent
_SOURCES = tuple(_HERE / f"{name}.c" for name in ("attention", "hc", "linear", "moe", "norm"))
_HEADER = _HERE / "numbers.h"
_COMPILERS = ("cc", "gcc", "clang")
# Sums may be reordered, so that they are vectorised; NaN and infinities keep their meaning.
_FLAGS = (
    "-std=c11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-fPIC",
    "-shared",
)
_LONGEST_COMPILE_S = 120.0
_BUILD = "build-"
_DIGEST_BYTES = hashlib.sha256().digest_size

# What the parameters of each function are: i64, int, float, pointer.
_SIGNATURES = {
    "fp8_rows": "iiiiiipppiipd",
    "rms_norm": "iifpidppd",
    "rotate": "iiiipidpf",
    "norm_rotate": "iiiifpidpp",
    "hc_mix": "iiiiiffpppdpdpp",
    "hc_expand": "iiipdpdpp",
    "swiglu": "iifpd",
    "route": "iiiipppppiddfpp",
    "unpack_fp4": "iiippp",
    "experts_fp4": "iiiiiiifpppdppp",
    "sparse_decode": "iiipdpdpipdpipp",
}
_TYPES = {
    "i": ctypes.c_int64,
    "d": ctypes.c_int,
    "f": ctypes.c_float,
    "p": ctypes.c_void_p,
}


class Library(ctypes.PyDLL):
    """The loaded functions. Calls keep the interpreter's lock: they take microseconds."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        for name, letters in _SIGNATURES.items():
            function = getattr(self, name)
            function.argtypes = [_TYPES[letter] for letter in letters]
            function.restype = ctypes.c_int


def load_library(cache: Path | None = None) -> Library | str:
    """The library, compiled if it has to be, or a sentence why there is none.

    Args:
        cache: where compiled libraries are kept; None for the user's cache directory.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if platform.system() != "Linux" or compiler is None:
        return "there is no C compiler (cc, gcc or clang) on Linux here"
    try:
        cache = cache or Path.home() / ".cache" / "metainfer" / "native"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_ours(cache)
        path = cache / f"kernels-{_key(compiler)}.so"
        return Library(path) if _is_whole(path) else _compiled(compiler, path)
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        return f"the C kernels cannot be built or loaded: {error}"


def _key(compiler: str) -> str:
    """Changes with everything that the machine code depends on."""
    sources = [path.read_bytes() for path in (_HEADER, *_SOURCES)]
    parts = [*sources, compiler.encode(), repr(_FLAGS).encode(), _cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _cpu() -> bytes:
    """What -march=native looks at: a home directory may be shared by different machines."""
    lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
    wanted = (b"vendor_id", b"cpu family", b"model", b"flags", b"Features", b"CPU part")
    kept = [line for line in lines if line.startswith(wanted)]
    return platform.machine().encode() + b"".join(kept)


def _is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of all that is before: to load one that was cut short
    would kill the process."""
    if not path.is_file():
        return False
    data = path.read_bytes()
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _compiled(compiler: str, path: Path) -> Library:
    """Compile into `path`, which appears whole, with its digest, and only if it can be loaded."""
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=_BUILD, dir=path.parent) as build:
        unfinished = Path(build) / "kernels.so"
        _run([compiler, *_FLAGS, "-o", str(unfinished), *map(str, _SOURCES), "-lm"], build)
        digest = hashlib.sha256(unfinished.read_bytes()).digest()
        with unfinished.open("ab") as file:
            file.write(digest)
        library = Library(unfinished)
        os.replace(unfinished, path)
        return library


def _run(command: list[str], folder: str) -> None:
    """The compiler, whose own files go where they are removed. An interruption ends all that it
    started."""
    with signals_held():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=child_environment(TMPDIR=folder),
            start_new_session=True,
        )
    try:
        _, said = process.communicate(timeout=_LONGEST_COMPILE_S)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        lines = said.strip().splitlines() or ["no output"]
        raise RuntimeError(f"{command[0]} failed: {lines[0]}")


def _sweep(cache: Path) -> None:
    """Remove what processes that were killed while they compiled have left."""
    for left in cache.glob(f"{_BUILD}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * _LONGEST_COMPILE_S:
                shutil.rmtree(left, ignore_errors=True)
