"""Tuning: candidates of an operation are held against its reference, then timed in turns.

Inputs are fresh random numbers and memory that a kernel takes is poisoned, as in verification
(`verify`). Candidates that passed are timed over the same inputs: as CUDA graphs on a GPU, since
that is how decode steps run them, one round of each after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from metainfer.core.errors import first_line
from metainfer.kernels.compare import Poisoned, changed, compare, run
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.inputs.load import LOADED
from metainfer.kernels.inputs.series import draw_one, draw_series
from metainfer.kernels.memory_bound import NoRoomError, is_out_of_memory
from metainfer.kernels.platform import Platform
from metainfer.kernels.registry import Registry
from metainfer.kernels.timing import Stopwatch, Timed
from metainfer.kernels.tuned import backend_of
from metainfer.kernels.verify import exact_products
from metainfer.ops.base import Load, Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.use import DECODE, PREFILL, Use

_MOST_SERIES = 4
_ROUNDS_S = 0.06  # for each of several candidates at each load
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 40


@dataclass(frozen=True, slots=True)
class TuneSizes:
    """Sizes that candidates are timed at.

    Attributes:
        prefill_rows, decode_batches: rows of steps; others go by the next larger.
        entries: of context, or tokens where a case has no entries; times are added over these.
    """

    prefill_rows: tuple[int, ...]
    decode_batches: tuple[int, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(cls, device: str, chunk: int) -> TuneSizes:
        """Those that are taken where nobody says otherwise.

        Args:
            chunk: rows of the largest step of prefill.
        """
        if device == "cpu":
            return cls((min(256, chunk),), (1, 8, 16), (2048,))
        return cls((min(512, chunk), chunk), (1, 8, 16, 64), (2048, 32768))


@dataclass(slots=True)
class Work:
    """One operation at one case.

    Attributes:
        loads: by rows, what is run.
        candidates: the default first.
        bad: by candidate, what was wrong; grows.
    """

    op: str
    case: Any
    loads: Mapping[int, tuple[Load, ...]]
    candidates: tuple[str, ...]
    bad: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimedRows:
    """Attributes:
    seconds: by candidate, of a call of so many rows, added over `tokens`.
    method: "graph" or "series".
    """

    rows: int
    tokens: tuple[int, ...]
    method: str
    seconds: Mapping[str, float]


def works_of(
    uses: Iterable[Use],
    registry: Registry,
    target: Target,
    order: str,
    sizes: TuneSizes,
    longest: int,
) -> list[Work]:
    """Those with a choice first; what references alone run is left out.

    Args:
        longest: tokens of the longest sequence.
    """
    works = []
    for use in uses:
        candidates = registry.candidates(use.op, use.case, target, order)
        if use.op in LOADED and candidates:
            works.append(Work(use.op, use.case, _loads(use, sizes, longest), candidates))
    return sorted(works, key=lambda work: len(work.candidates) == 1)


def _loads(use: Use, sizes: TuneSizes, longest: int) -> dict[int, tuple[Load, ...]]:
    """By rows; of several contexts that cost the same, the first. A step of prefill has as many
    rows as wanted wherever a sequence can be so long: contexts are no shorter than that."""
    wanted = {
        *(sizes.decode_batches if DECODE in use.phases else ()),
        *(sizes.prefill_rows if PREFILL in use.phases else ()),
    }
    found: dict[int, tuple[Load, ...]] = {}
    for rows in sorted(wanted):
        loads: dict[Any, Load] = {}
        for count in sizes.entries:
            tokens = count * max(getattr(use.case, "ratio", 1), 1)
            load = Load(rows, min(tokens, longest))
            if PREFILL in use.phases:
                tokens = min(max(tokens, rows), longest)
                load = Load(min(rows, tokens), tokens)
            loads.setdefault(OPS[use.op].cost(use.case, load), load)
        found[load.rows] = tuple(loads.values())
    return found


class Bench:
    """Checks and times candidates on one platform.

    Args:
        cache_dtype: of caches that hold plain numbers; "" for that of the case.
    """

    def __init__(self, on: Platform, seed: int, cache_dtype: str = "") -> None:
        self._on = on
        self._seed = seed
        self._cache_dtype = cache_dtype
        self._watch = Stopwatch(on.device)
        self._expected: tuple[Any, dict[Load, tuple[Any, ...]]] = (None, {})

    def problem(self, work: Work, candidate: str) -> str:
        """What is wrong with a candidate at any load; "" for nothing. Raises NoRoomError alone."""
        try:
            for rows, loads in work.loads.items():
                if not self._differs(work, candidate, rows):
                    continue
                for load in loads:
                    found = self._compared(work, candidate, load)
                    if found:
                        return f"{found} ({load.rows} rows, {load.tokens} tokens)"
        except Exception as error:  # whatever a kernel raises is what is to be reported
            said = f"{type(error).__name__}: {first_line(error)}"
            if is_out_of_memory(error):
                raise NoRoomError(said) from error
            return said
        return ""

    def _compared(self, work: Work, candidate: str, load: Load) -> str:
        draw = self._draw(work, load)
        call = draw()
        with Poisoned():
            actual = run(self._on.registry, work.op, candidate, work.case, call)
        inputs = draw()
        found = compare(work.op, work.case, inputs, actual, self._reference(work, load))
        return found.problem or changed(work.op, inputs, call)

    def _reference(self, work: Work, load: Load) -> tuple[Any, ...]:
        """Results of the reference, kept for the other candidates of a work."""
        key = work.op, work.case
        if self._expected[0] != key:
            self._expected = key, {}
        known = self._expected[1]
        if load not in known:
            with exact_products():
                known[load] = run(
                    self._on.registry, work.op, REFERENCE, work.case, self._draw(work, load)()
                )
        return known[load]

    def _draw(self, work: Work, load: Load) -> Callable[[], Call]:
        return partial(
            draw_one, work.op, work.case, load, self._on.device, self._seed, self._cache_dtype
        )

    def times(self, work: Work) -> tuple[TimedRows, ...]:
        """Of all candidates that are not bad."""
        self._expected = (None, {})  # its memory is wanted
        found = []
        for rows, loads in work.loads.items():
            names = [
                name
                for name in work.candidates
                if name not in work.bad and self._differs(work, name, rows)
            ]
            if not names:
                continue
            total = dict.fromkeys(names, 0.0)
            methods = set()
            for load in loads:
                method, seconds = self._timed(work, names, load)
                methods.add(method)
                for name in names:
                    total[name] += seconds[name]
            tokens = tuple(load.tokens for load in loads)
            found.append(TimedRows(rows, tokens, " and ".join(sorted(methods)), total))
        return tuple(found)

    def _differs(self, work: Work, candidate: str, rows: int) -> bool:
        """Whether a candidate is another one than its backend at so many rows."""
        backend = self._on.registry.backends(work.op)[backend_of(candidate)]
        variant = candidate.partition(":")[2]
        most = backend.variants[variant].most_rows if variant else None
        return most is None or rows <= most

    def _timed(self, work: Work, names: Sequence[str], load: Load) -> tuple[str, dict[str, float]]:
        """(method, seconds by candidate) over the same inputs."""
        series = draw_series(
            work.op, work.case, load, self._on.device, self._seed, _MOST_SERIES, self._cache_dtype
        )
        calls = self._calls(work, names, series)
        held_s = {name: self._watch.warm(calls[name]) for name in names}
        replays = {name: self._watch.recorded(calls[name]) for name in names}
        clocks: dict[str, Callable[[], float]] = {}
        for name in names:
            replay = replays[name]
            if replay is None or None in replays.values():
                clocks[name] = partial(self._watch.series_s, calls[name], held_s[name])
            else:
                clocks[name] = partial(self._watch.replay_s, replay, len(calls[name]))
        method = "series" if None in replays.values() else "graph"
        return method, in_turns(clocks)

    def _calls(
        self, work: Work, names: Sequence[str], series: Sequence[Call]
    ) -> dict[str, list[Timed]]:
        """What runs each candidate; weights are prepared once for those that prepare them alike."""
        op, case = work.op, work.case
        kept: dict[tuple[int, Any], Any] = {}
        calls: dict[str, list[Timed]] = {}
        for name in names:
            chosen = self._on.registry.candidate(op, name)
            for number, call in enumerate(series):
                arguments = call.arguments
                if OPS[op].weights:
                    key = number, chosen.prepare
                    if key not in kept:
                        prepare = chosen.prepare
                        kept[key] = prepare(case, *call.weights) if prepare else call.weights
                    arguments = (kept[key], *arguments)
                calls.setdefault(name, []).append(partial(chosen.run, case, *arguments))
            while self._on.device == "cuda" and len(calls[name]) < _MOST_SERIES:
                calls[name] += calls[name]
        return calls


def in_turns(clocks: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Lower quartiles of clocks that are read in turns, in this order and the other: a machine that
    does other things beside makes calls longer, never shorter. One alone is read once or twice."""
    found: dict[str, list[float]] = {name: [] for name in clocks}
    names = list(clocks)
    several = len(names) > 1
    until_s = time.perf_counter() + (_ROUNDS_S * len(names) if several else 0.0)
    for number in range(_MOST_ROUNDS):
        if number >= (_LEAST_ROUNDS if several else 2) and time.perf_counter() > until_s:
            break
        for name in names if number % 2 else names[::-1]:
            found[name].append(clocks[name]())
    return {name: sorted(times)[len(times) // 4] for name, times in found.items()}


def settle(device: str, threads: int) -> None:
    """As many threads as steps on a CPU will have."""
    if device == "cpu" and threads:
        torch.set_num_threads(threads)
