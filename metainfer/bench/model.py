"""This engine and transformers on the same checkpoint and CPU, taking turns.

Each side is a process of its own (`bench.side_process`); while one works the others wait. The order
turns round every round, so that what the machine does besides falls on all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from metainfer.arch.families import read_arch
from metainfer.bench.contender import ENGINE, PEER_DTYPES, Timing
from metainfer.bench.model_settings import ModelLoad
from metainfer.bench.side_process import SideProcess, side_process
from metainfer.bench.stage import sized
from metainfer.bench.traffic import draw_prompts
from metainfer.plan.settings import EngineSettings

REST_S = 0.2
"""Lets the threads of the side that worked before come to rest."""


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
    arch = read_arch(directory)
    base = EngineSettings(device="cpu", threads=threads)
    settings = sized(base, arch, _longest(load), max(load.decode_batches))
    setup = {
        "model": str(directory),
        "settings": asdict(settings),
        "device": "cpu",
        "threads": threads,
    }
    with ExitStack() as stack:
        sides = {}
        for side in (ENGINE, *PEER_DTYPES):
            title = side_title(side)
            on_step(f"loading {title}")
            process = side_process(title, {"side": side, **setup}, threads)
            sides[side] = stack.enter_context(process)
        on_step("taking turns")
        timings = _take_turns(load, sides, arch.vocab_size, on_progress)
        on_step("comparing greedy tokens")
        prompts = [
            draw_prompts(f"{load.seed}/agree/{n}", 1, load.decode_context, arch.vocab_size)
            for n in range(load.agreement_prompts)
        ]
        return [_result(load, name, side, timings, prompts) for name, side in sides.items()]


def _result(
    load: ModelLoad,
    name: str,
    side: SideProcess,
    timings: Mapping[tuple[str, str], Sequence[Timing]],
    prompts: Sequence[Sequence[Sequence[int]]],
) -> SideResult:
    count = load.agreement_tokens
    greedy = [side.must("greedy", prompts=p, count=count)["ids"] for p in prompts]
    return SideResult(
        name,
        str(side.ready["dtype"]),
        {work.name: tuple(timings[name, work.name]) for work in works(load)},
        int(side.ready["libraries_bytes"]),
        side.must("memory")["peak_bytes"],
        tuple(map(tuple, greedy)),
    )


def side_title(side: str) -> str:
    return side if side == ENGINE else f"transformers {side}"


def _take_turns(
    load: ModelLoad,
    sides: Mapping[str, SideProcess],
    vocab_size: int,
    on_progress: Callable[[int, int], None],
) -> dict[tuple[str, str], list[Timing]]:
    timings: dict[tuple[str, str], list[Timing]] = {}
    all_works = works(load)
    total = (load.rounds + 1) * len(all_works) * len(sides)
    done = 0
    for round_number in range(load.rounds + 1):  # round 0 warms up and is not kept
        for work in all_works:
            key = f"{load.seed}/{round_number}/{work.name}"
            prompts = draw_prompts(key, work.batch, work.prompt_tokens, vocab_size)
            for name in list(sides)[:: 1 if round_number % 2 else -1]:
                time.sleep(REST_S)
                said = sides[name].must(work.do, prompts=prompts, count=work.count)
                timing = Timing(said["tokens"], said["seconds"])
                done += 1
                on_progress(done, total)
                if round_number:
                    timings.setdefault((name, work.name), []).append(timing)
    return timings


def _longest(load: ModelLoad) -> int:
    return max(
        load.prefill_tokens + 1,
        load.decode_context + max(load.decode_tokens, load.agreement_tokens),
    )
