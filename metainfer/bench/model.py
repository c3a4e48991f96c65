"""This engine and transformers on the same checkpoint and CPU, taking turns.

Each side is a process of its own that stays loaded; while one works the others wait. The order
turns round every round, so that what the machine does besides falls on all alike. The parent
imports no torch.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.arch.families import read_arch
from metainfer.bench.contender import ENGINE, PEER_DTYPES, Timing
from metainfer.bench.model_settings import ModelLoad
from metainfer.core.env import child_environment
from metainfer.core.errors import UserError

_LONGEST_WORK_S = 600.0
_REST_S = 0.2  # lets the threads of the side that worked before come to rest
_MOST_STDERR_LINES = 5


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work that is timed: its name, and what the worker is told."""

    name: str
    do: str
    batch: int
    prompt_tokens: int
    count: int


@dataclass(frozen=True, slots=True)
class SideResult:
    """What one side did.

    Attributes:
        timings: name of the work -> one Timing per round.
        libraries_bytes: memory once its libraries were imported.
        peak_bytes: most memory it held.
        greedy: tokens after each prompt of the agreement.
    """

    side: str
    dtype: str
    timings: Mapping[str, tuple[Timing, ...]]
    libraries_bytes: int
    peak_bytes: int
    greedy: tuple[tuple[int, ...], ...]


def works(load: ModelLoad) -> list[Work]:
    """What is timed, in order."""
    return [
        Work(f"prefill {load.prefill_tokens}", "prefill", 1, load.prefill_tokens, 1),
        *(
            Work(f"decode batch {batch}", "decode", batch, load.decode_context, load.decode_tokens)
            for batch in load.decode_batches
        ),
    ]


def measure(
    load: ModelLoad,
    directory: Path,
    threads: int,
    on_progress: Callable[[int, int], None],
    on_step: Callable[[str], None],
) -> list[SideResult]:
    """Let all sides take turns. The engine is first in the result, then the peers.

    Args:
        on_progress: called with (turns taken, turns in all).
        on_step: told in a few words what begins.

    Raises UserError if a side cannot start or fails.
    """
    vocab_size = read_arch(directory).vocab_size
    setup = {
        "directory": str(directory),
        "threads": threads,
        "max_model_len": _longest(load),
        "max_num_seqs": max(load.decode_batches),
    }
    with ExitStack() as stack:
        workers = []
        for side in (ENGINE, *PEER_DTYPES):
            on_step(f"loading {side_title(side)}")
            workers.append(stack.enter_context(_worker(side, setup)))
        on_step("taking turns")
        timings = _take_turns(load, workers, vocab_size, on_progress)
        on_step("comparing greedy tokens")
        prompts = [
            draw_prompts(f"{load.seed}/agree/{n}", 1, load.decode_context, vocab_size)
            for n in range(load.agreement_prompts)
        ]
        results = []
        for worker in workers:
            greedy = [worker.ask("greedy", p, load.agreement_tokens)["ids"] for p in prompts]
            results.append(
                SideResult(
                    worker.side,
                    worker.dtype,
                    {work.name: tuple(timings[worker.side, work.name]) for work in works(load)},
                    worker.libraries_bytes,
                    worker.ask("memory")["peak_bytes"],
                    tuple(map(tuple, greedy)),
                )
            )
    return results


def side_title(side: str) -> str:
    return side if side == ENGINE else f"transformers {side}"


def draw_prompts(key: str, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids that only this key gives; special tokens at the start are left out."""
    generator = random.Random(key)
    first = min(16, vocab_size - 1)
    return [[generator.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]


def _take_turns(
    load: ModelLoad,
    workers: Sequence[_Worker],
    vocab_size: int,
    on_progress: Callable[[int, int], None],
) -> dict[tuple[str, str], list[Timing]]:
    timings: dict[tuple[str, str], list[Timing]] = {}
    all_works = works(load)
    total = (load.rounds + 1) * len(all_works) * len(workers)
    done = 0
    for round_number in range(load.rounds + 1):  # round 0 warms up and is not kept
        for work in all_works:
            key = f"{load.seed}/{round_number}/{work.name}"
            prompts = draw_prompts(key, work.batch, work.prompt_tokens, vocab_size)
            for worker in workers if round_number % 2 else workers[::-1]:
                time.sleep(_REST_S)
                timing = Timing(**worker.ask(work.do, prompts, work.count))
                done += 1
                on_progress(done, total)
                if round_number:
                    timings.setdefault((worker.side, work.name), []).append(timing)
    return timings


def _longest(load: ModelLoad) -> int:
    return max(
        load.prefill_tokens + 1,
        load.decode_context + max(load.decode_tokens, load.agreement_tokens),
    )


class _Worker:
    """The parent's end of one side's process."""

    def __init__(self, side: str, process: subprocess.Popen[str], log: Path) -> None:
        self.side = side
        self._process = process
        self._log = log
        ready = self._read()
        self.dtype = str(ready["dtype"])
        self.libraries_bytes = int(ready["libraries_bytes"])

    def ask(self, do: str, prompts: Sequence[Sequence[int]] = (), count: int = 0) -> dict[str, Any]:
        assert self._process.stdin is not None
        command = json.dumps({"do": do, "prompts": prompts, "count": count})
        with suppress(BrokenPipeError):  # it has died: what it said last is read below
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], _LONGEST_WORK_S)
        line = stdout.readline() if readable else ""
        if line:
            record: dict[str, Any] = json.loads(line)
            return record
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = "ended" if readable else f"did not answer within {_LONGEST_WORK_S:g} s"
        raise UserError(
            f"{side_title(self.side)} {how}: {said[-1] if said else 'no output'}",
            hint="\n".join(said[-_MOST_STDERR_LINES:]) or None,
        )


@contextmanager
def _worker(side: str, setup: Mapping[str, Any]) -> Iterator[_Worker]:
    """Start one side's process and end it in any case."""
    environment = child_environment(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        OMP_NUM_THREADS=str(setup["threads"]),
    )
    with tempfile.TemporaryDirectory(prefix="metainfer-bench-") as directory:
        log = Path(directory) / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "metainfer.bench.worker",
                    json.dumps({"side": side, **setup}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends them all
            )
        try:
            yield _Worker(side, process, log)
        finally:
            process.kill()
            process.communicate()
