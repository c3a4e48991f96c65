"""Code of many units compiled beforehand, in processes at the same time, and left on disk where the
first start of each finds it.

They are processes of a program of their own: nothing of whoever starts them runs again in them, and
none touches a GPU. What does not compile here is left to its first start, which says why.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.runtime.cache import get_cache_manager

from metainfer.core.env import child_environment
from metainfer.core.threads import in_threads
from metainfer.kernels.gpu import code_cache
from metainfer.kernels.gpu.program import CudaUnit
from metainfer.kernels.triton.compile_all import unit_key

_FEWEST = 4
"""Missing units for which processes are worth starting: each takes seconds to come up."""

Progress = Callable[[int, int], None]  # (done, total)


def default_folder() -> Path:
    return Path.home() / ".cache" / "metainfer" / "ahead"


@dataclass(frozen=True, slots=True)
class Form:
    """What is compiled: machine code for GPUs of a capability, or PTX that newer ones run."""

    capability: tuple[int, int]
    portable: bool = False

    @property
    def kind(self) -> str:
        return code_cache.PTX if self.portable else code_cache.CUBIN


def missing_units(units: Iterable[Any], form: Form) -> list[Any]:
    """Those whose code is not on disk, as far as is known."""
    return [unit for unit in units if not _is_kept(unit, form)]


def compile_ahead(
    units: Sequence[Any],
    form: Form,
    workers: int,
    on_progress: Progress | None = None,
) -> int:
    """Compile `units`; returns of how many the code is on disk now.

    Args:
        workers: processes at once.
        on_progress: called from threads of this process, one at a time.
    """
    if len(units) < _FEWEST:
        return 0
    # The largest last would keep one process busy when the others are done.
    waiting = sorted(units, key=lambda unit: not isinstance(unit, CudaUnit), reverse=True)
    count = _Count(len(units), on_progress)
    lock = threading.Lock()

    def next_unit() -> Any:
        with lock:
            return waiting.pop() if waiting else None

    def work() -> None:
        with contextlib.suppress(OSError), _worker(form) as process:
            while (unit := next_unit()) is not None:
                count.add(_asked(process, unit, form))

    number = min(workers, len(units))
    in_threads([work] * number, number)
    return count.kept


class _Count:
    """Of units that are done."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self.kept = 0
        self._done, self._total = 0, total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, kept: bool) -> None:
        with self._lock:
            self._done += 1
            self.kept += kept
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)


@contextlib.contextmanager
def _worker(form: Form) -> Any:
    """A process that compiles, which ends with the block."""
    command = [sys.executable, "-m", "metainfer.kernels.triton.ahead_worker"]
    process = subprocess.Popen(
        [*command, *map(str, form.capability), form.kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=child_environment(OMP_NUM_THREADS="1"),
        start_new_session=True,  # Ctrl-C reaches the parent alone
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _asked(process: Any, unit: Any, form: Form) -> bool:
    """Whether the process compiled it. One that ends takes the unit at fault with it.

    Raises OSError where it has ended.
    """
    process.stdin.write(base64.b64encode(pickle.dumps(unit)).decode() + "\n")
    process.stdin.flush()
    said = process.stdout.readline().split()
    if not said:
        raise BrokenPipeError("the compiler ended its process")
    if said[0] == "kept" and len(said) > 1:
        _note_kept(unit, form, said[1])
    return bool(said[0] == "kept")


def _is_kept(unit: Any, form: Form) -> bool:
    if isinstance(unit, CudaUnit):
        return code_cache.is_kept(unit, form.capability, kind=form.kind)
    with contextlib.suppress(OSError):
        name = _note_of(unit, form).read_text(encoding="ascii")
        return bool(get_cache_manager(name).get_group(f"{unit.name}.json"))
    return False


def _note_kept(unit: Any, form: Form, name: str) -> None:
    """Remember under which name Triton keeps it."""
    path = _note_of(unit, form)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        unfinished.write_text(name, encoding="ascii")
        os.replace(unfinished, path)


def _note_of(unit: Any, form: Form) -> Path:
    return default_folder() / f"{unit_key(unit, form.capability)}.{form.kind}"
