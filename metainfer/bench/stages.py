"""Settings of one engine at the same work, taking turns: who is first alternates every round.

Every prompt is drawn anew for each round and each piece of work, so that no engine sees one twice.
Engines are processes that stay loaded beside each other; where they do not fit, each turn of a
setting is a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from metainfer.arch.record import Arch
from metainfer.bench.contender import ENGINE
from metainfer.bench.model import REST_S, Work
from metainfer.bench.side_process import Refused, SideProcess, side_process
from metainfer.bench.stage import Setting
from metainfer.bench.stages_settings import AUTO, IN_TURNS, TOGETHER, StagesLoad
from metainfer.bench.traffic import draw_arrivals, draw_prompts
from metainfer.core.errors import UserError

PREFILL, DECODE, TRAFFIC = "prefill", "decode", "traffic"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side: how its process is set up (`bench.worker`).

    Attributes:
        once: what its first process is asked for besides.
    """

    name: str
    setup: Mapping[str, Any]
    threads: int
    once: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SideRun:
    """What one side said.

    Attributes:
        ready: its receipt.
        turns: name of the work -> what it said after each turn that counts.
        missing: name of the work -> why it was not done.
        memory: its peaks, and how it counted tokens; the largest of its processes.
        kernels_compiled: while requests waited for them.
    """

    ready: dict[str, Any] = field(default_factory=dict)
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    kernels_compiled: int = 0

    def close(self, process: SideProcess) -> None:
        """Read what a process has to say at its end."""
        for name, value in process.must("memory").items():
            if name in ("peak_bytes", "device_peak_bytes"):
                self.peaks[name] = max(filter(None, (value, self.peaks.get(name))), default=None)
        told = process.must("counted")
        for name in ("prompt_tokens", "cached_tokens"):
            self.counted[name] = self.counted.get(name, 0) + told[name]
        self.kernels_compiled += told.get("kernels_compiled", 0)


@dataclass(frozen=True, slots=True)
class StagesRun:
    """Attributes:
    engines: "together" or "in-turns".
    sides: by name, in order.
    rounds: that were completed.
    loaded_s: that passed before the first turn, which the budget counts.
    """

    engines: str
    sides: Mapping[str, SideRun]
    rounds: int
    loaded_s: float = 0.0


def engine_contestant(
    name: str, setting: Setting, model: str, threads: int, once: Mapping[str, Any] | None = None
) -> Contestant:
    setup = {"side": ENGINE, "model": model, "settings": asdict(setting.engine)}
    return Contestant(name, setup, threads, once or {})


def check_of(load: StagesLoad) -> dict[str, Any]:
    """What an engine's first process is asked for where positions are to be checked."""
    if not load.check_positions:
        return {}
    tokens = max(load.input_lens)
    return {"check": {"tokens": tokens, "count": load.check_positions, "seed": load.seed}}


def works_of(load: StagesLoad) -> list[Work]:
    """What is timed, in order."""
    found = [Work(f"{PREFILL} {n}", PREFILL, 1, n, 1) for n in load.input_lens]
    found += [
        Work(f"{DECODE} batch {batch}", DECODE, batch, load.decode_context, load.decode_tokens)
        for batch in load.decode_batches
    ]
    if load.requests:
        pattern = load.pattern
        found.append(Work(TRAFFIC, TRAFFIC, pattern.requests, pattern.longest, pattern.answer))
    return found


def measure(
    load: StagesLoad,
    contestants: Sequence[Contestant],
    arch: Arch,
    on_progress: Callable[[int, int], None],
    on_step: Callable[[str], None],
) -> StagesRun:
    """Let all sides take turns.

    Args:
        on_progress: called with (turns taken, turns in all).
        on_step: told in a few words what begins.

    Raises UserError if a side ends, or cannot start where no other can.
    """
    engines, began_s = load.engines, time.monotonic()
    with ExitStack() as stack:
        loaded: dict[str, SideProcess] = {}
        if engines in (AUTO, TOGETHER):
            try:
                for one in contestants:
                    on_step(f"loading {one.name}")
                    loaded[one.name] = stack.enter_context(_process(_first(one)))
                engines = TOGETHER
            except Refused as error:
                if engines == TOGETHER or not loaded:
                    raise
                on_step(f"beside the others it does not fit ({error.message}): engines in turns")
                stack.close()
                loaded, engines = {}, IN_TURNS
        run = _Run(load, contestants, arch, loaded, on_progress, began_s)
        on_step("taking turns")
        rounds = run.rounds()
        for name, process in loaded.items():
            run.sides[name].close(process)
        return StagesRun(engines, run.sides, rounds, run.loaded_s)


def require_turns(run: StagesRun) -> None:
    """Raises UserError if no side took a turn that counts, with the reason of one of them."""
    sides = run.sides.items()
    if any(side.turns for _, side in sides):
        return
    for name, side in sides:
        for work, why in side.missing.items():
            raise UserError(f"nothing was measured: {name}, {work}: {why}")
    loading = f": loading took {run.loaded_s:.0f} s" if run.engines == TOGETHER else ""
    raise UserError(
        f"there was time for no turn that counts{loading}, and warming up comes first",
        hint="give a longer --budget, or fewer and shorter works (--input-lens, --decode-batches,"
        " --longest-warm-up)",
    )


def _first(one: Contestant) -> Contestant:
    """As its first process is set up."""
    return replace(one, setup={**one.setup, **one.once})


def _process(one: Contestant) -> AbstractContextManager[SideProcess]:
    return side_process(one.name, one.setup, one.threads)


class _Run:
    """The turns, and what was said so far."""

    def __init__(
        self,
        load: StagesLoad,
        contestants: Sequence[Contestant],
        arch: Arch,
        loaded: Mapping[str, SideProcess],
        on_progress: Callable[[int, int], None],
        began_s: float,
    ) -> None:
        self.sides = {one.name: SideRun() for one in contestants}
        for name, process in loaded.items():
            self.sides[name].ready = process.ready
        self._load = load
        self._contestants = contestants
        self._vocab_size = arch.vocab_size
        self._loaded = loaded
        self._on_progress = on_progress
        self._done = 0
        self._refused: Refused | None = None
        self._works = works_of(load)
        budget_s = load.budget_s
        self._until_s = None if budget_s is None else began_s + budget_s
        self.loaded_s = time.monotonic() - began_s

    def rounds(self) -> int:
        """Take all turns that the time allows; returns how many rounds were completed."""
        completed = 0
        if not self._load.rounds and not self._loaded:
            for one in self._contestants:
                self._look_at(one)
        for number in range(1, self._load.rounds + 1):
            order = list(self._contestants)[:: 1 if number % 2 else -1]
            if self._loaded:
                if number == 1:  # warms up, and is not kept
                    self._interleaved(0, order)
                whole = self._interleaved(number, order)
            else:
                turns = [self._alone(number, one) for one in order]
                whole = all(turns)
            completed += whole
        if self._refused is not None and not any(side.ready for side in self.sides.values()):
            raise self._refused
        return completed

    def _interleaved(self, number: int, order: Sequence[Contestant]) -> bool:
        """All works, each by one side after the other."""
        for work in self._works:
            for one in order:
                if not self._turn(number, work, one.name, self._loaded[one.name]):
                    return False
        return True

    def _alone(self, number: int, one: Contestant) -> bool:
        """All works by one side in a process of its own, once to warm up and once that counts. A
        side that does not start misses them all."""
        if self._is_late():
            return False
        side = self.sides[one.name]
        if all(work.name in side.missing for work in self._works):
            return True
        try:
            with _process(one if side.ready else _first(one)) as process:
                side.ready = side.ready or process.ready
                whole = all(
                    self._turn(n, work, one.name, process)
                    for work in self._works
                    for n in (0, number)
                )
                side.close(process)
        except Refused as error:
            self._refused = error
            side.missing |= {work.name: error.message for work in self._works}
            return True
        return whole

    def _look_at(self, one: Contestant) -> None:
        """Its receipt, and no turn."""
        side = self.sides[one.name]
        with _process(_first(one)) as process:
            side.ready = process.ready
            side.close(process)

    def _turn(self, number: int, work: Work, name: str, process: SideProcess) -> bool:
        """Whether there was time for it. Turns of number 0 do not count."""
        side = self.sides[name]
        if work.name in side.missing:
            return True
        if self._is_late():
            return False
        time.sleep(REST_S)
        cached = process.must("counted")["cached_tokens"]
        said = process.ask(work.do, **self._asked(work, number))
        self._done += 1
        total = (self._load.rounds + 1) * len(self._works) * len(self._contestants)
        self._on_progress(min(self._done, total), total)
        if "failed" in said:
            side.missing[work.name] = said["failed"]
            side.turns.pop(work.name, None)
        elif number:
            cached = process.must("counted")["cached_tokens"] - cached
            side.turns.setdefault(work.name, []).append({**said, "cached_tokens": cached})
        return True

    def _asked(self, work: Work, number: int) -> dict[str, Any]:
        """Fresh prompts, the same for all sides in one round."""
        key = f"{self._load.seed}/{number}/{work.name}"
        if work.do == TRAFFIC:
            arrivals = draw_arrivals(self._load.pattern, key, self._vocab_size)
            if not number:
                arrivals = arrivals[: max(1, len(arrivals) // 4)]
            return {"arrivals": [asdict(arrival) for arrival in arrivals]}
        length, most = work.prompt_tokens, self._load.longest_warm_up
        if not number and most is not None:
            length = min(length, most)
        prompts = draw_prompts(key, work.batch, length, self._vocab_size)
        return {"prompts": prompts, "count": work.count}

    def _is_late(self) -> bool:
        return self._until_s is not None and time.monotonic() > self._until_s
