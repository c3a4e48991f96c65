"""Compiles many units at once, in processes of their own, and remembers what came out.

What is kept is the facts of the machine code, not the code: one small file per unit and target,
named after all that the code depends on. Units that fail are tried again the next time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import triton

from metainfer.core.files import replace_file
from metainfer.kernels.processes import interrupts_held
from metainfer.kernels.triton import machine_code
from metainfer.kernels.triton.machine_code import MachineCode
from metainfer.kernels.triton.record import CompileUnit

Capability = tuple[int, int]
Job = tuple[CompileUnit, Capability]
Outcome = MachineCode | str
"""The facts, or one line that says why there is no code."""

Progress = Callable[[int, int], None]  # (done, total)
_LINE_CHARACTERS = 300


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "coverage"


def compile_all(
    jobs: Iterable[Job],
    workers: int,
    cache: Path | None = None,
    on_progress: Progress | None = None,
) -> Mapping[Job, Outcome]:
    """Every unit compiled for its target.

    Args:
        workers: processes at once.
        cache: where facts are kept; None for the user's cache directory. One that cannot be
            written keeps nothing.
        on_progress: told how many of the units that are not in the cache are done.
    """
    cache = cache or default_cache()
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    outcomes: dict[Job, Outcome] = {}
    missing: dict[Job, Path] = {}
    for job in dict.fromkeys(jobs):
        try:
            path = cache / f"{unit_key(*job)}.json"
        except Exception as error:  # Triton reads the source to hash it, and may refuse it
            outcomes[job] = _one_line(error, "")
            continue
        known = _read(path)
        if known is None:
            missing[job] = path
        else:
            outcomes[job] = known
    for job, outcome in _compiled(list(missing), workers):
        outcomes[job] = outcome
        if isinstance(outcome, MachineCode):
            with contextlib.suppress(OSError):
                facts = json.dumps(dataclasses.asdict(outcome))
                replace_file(missing[job], facts.encode())
        if on_progress is not None:
            done = sum(job in outcomes for job in missing)
            on_progress(done, len(missing))
    return outcomes


def _compiled(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Outcome]]:
    """Outcomes as they come. A unit that kills its process is found out by running all that were
    left then in processes of their own."""
    if not jobs:
        return
    left = dict.fromkeys(jobs)
    with contextlib.suppress(BrokenProcessPool):
        for job, outcome in _in_processes(jobs, min(workers, len(jobs))):
            del left[job]
            yield job, outcome
    for job in list(left):
        try:
            yield from _in_processes([job], 1)
        except BrokenProcessPool:
            yield job, "the compiler ended its process"


def _in_processes(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Outcome]]:
    # Children of a process with threads must not be forked from it.
    spawn = multiprocessing.get_context("spawn")
    until, stop = spawn.Pipe(duplex=False)
    scratch = tempfile.TemporaryDirectory(prefix="metainfer-compile-")
    pool = ProcessPoolExecutor(
        workers, mp_context=spawn, initializer=_in_silence, initargs=(until, scratch.name)
    )
    futures: dict[Future[Outcome], Job] = {}
    done: SimpleQueue[Future[Outcome]] = SimpleQueue()  # waiting for it takes no lock of theirs
    try:
        with interrupts_held():
            for job in jobs:
                future = pool.submit(_compile, *job)
                futures[future] = job
                future.add_done_callback(done.put)
        for _ in jobs:
            future = done.get()
            yield futures[future], future.result()
    except BaseException:  # what is being compiled may take a minute more, and nobody wants it
        stop.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        stop.close()
        until.close()
        scratch.cleanup()


def _in_silence(until: Connection, scratch: str) -> None:
    """Workers end where their parent tells them to or was killed, and leave files where it removes
    them; what native code says at their end, of references that it lost count of, is nobody's
    concern."""
    tempfile.tempdir = scratch
    threading.Thread(target=_end_with_parent, args=(until,), daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _end_with_parent(until: Connection) -> None:
    parent = multiprocessing.parent_process()
    wait([until, *([] if parent is None else [parent.sentinel])])
    os._exit(1)


def _compile(unit: CompileUnit, capability: Capability) -> Outcome:
    """Runs in a worker. The compiler's files go when they were read, and what it prints is kept
    off the terminal."""
    with tempfile.TemporaryDirectory(prefix="metainfer-compile-") as directory:
        triton.knobs.cache.dir = directory
        said = Path(directory) / "said"
        with _output_to(said):
            try:
                return machine_code.inspect(unit.compile(capability))
            except Exception as error:  # whatever a compiler raises is what is to be reported
                failure = error
        printed = said.read_text(errors="replace")
        return _one_line(failure, printed)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Stdout and stderr of this process, of native code too, into a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with open(path, "wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        yield
    finally:
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
            os.close(old)


def _one_line(error: BaseException, printed: str) -> str:
    """The deepest reason, then what the compiler printed, shortened."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = f"{type(error).__name__}: {error} {printed}".split()
    return " ".join(words)[:_LINE_CHARACTERS]


def unit_key(unit: CompileUnit, capability: Capability) -> str:
    """Changes with everything that the machine code and the facts depend on."""
    constants = [(place, _constant(value)) for place, value in unit.constants]
    parts = (
        triton.__version__,
        Path(machine_code.__file__).read_text(encoding="utf-8"),
        unit.kernel.cache_key,
        repr((unit.signature, constants, unit.divisible, unit.options, capability)),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _constant(value: Any) -> str:
    return getattr(value, "cache_key", None) or repr(value)


def _read(path: Path) -> MachineCode | None:
    """Facts that were kept; None where that cannot be read."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return MachineCode(**{**facts, "matrix": tuple(facts["matrix"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
