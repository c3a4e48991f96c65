"""Measures how the GPUs of this machine talk and compute: curves and rates of the Machine record.

Time is shared out beforehand, and what is not reached is said. Nothing is timed over which wrong
data arrived. A rank that hangs or dies costs its own curve and a new set of processes.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from metainfer.comm.measure_crew import Crew, Lost, Member
from metainfer.comm.measure_rates import RATE_WORKS, RateWork, measure_rates
from metainfer.comm.measure_trials import SHARES, SIZES, Trial, area_bytes, denied, trials_of
from metainfer.comm.measure_worker import (
    Clock,
    MakeEngine,
    Prepare,
    Refused,
    Verify,
    cuda_engine,
)
from metainfer.comm.payload import GUARD_BYTES
from metainfer.core.units import format_bytes
from metainfer.hardware.curves import MEASURED_HERE, NCCL, Curve
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.hardware.measured import Measured, conditions, name_of, write_measured

LONGEST_S = 120.0
_END_S = 6.0  # kept for ending processes
_RATES_SHARE = 30
_LONGEST_START_S = 60.0
_LONGEST_PREPARE_S = 25.0
_LONGEST_ANSWER_S = 5.0
_SMALL_BYTES = 2**18
_TIMED_S = 0.004  # of a sample
_MOST_CALLS = 32
_SAMPLES = 3
_MOST_CREWS = 5
_MOST_LOST = 2  # of a means, after which it is left alone
_SPARE_BYTES = 2 * 2**30  # of a GPU, for contexts and collectives
_AREAS = 6  # of the largest payload, that a GPU holds at most

OnStep = Callable[[str], None]
OnProgress = Callable[[int, int], None]


def measure(
    machine: Machine,
    on_step: OnStep,
    on_progress: OnProgress,
    *,
    longest_s: float = LONGEST_S,
    make: MakeEngine = cuda_engine,
    sizes: Sequence[int] = SIZES,
    works: Sequence[RateWork] = RATE_WORKS,
    device: str = "cuda",
    cache: Path | None = None,
) -> Machine:
    """The machine at hand, which has GPUs, with what was measured of it, which is kept.

    Args:
        longest_s: of all.
        make: makes what moves bytes in a rank's process.
        works: whose rates are measured on `device`.
        cache: where it is kept; None for the user's cache.
    """
    assert not isinstance(machine.gpus, Unknown) and machine.gpus
    until_s = time.monotonic() + longest_s - _END_S
    shares = _Shares({**SHARES, "rates": _RATES_SHARE if works else 0}, until_s)
    survey = Survey(machine, make, sizes, shares, until_s, on_step, on_progress)
    try:
        survey.run()
    finally:
        survey.end()
    found = Measured(
        datetime.now(UTC).date().isoformat(),
        *conditions(machine),
        tuple(survey.curves),
        (),
        tuple(survey.notes()),
    )
    if works:
        on_step("measuring products, experts and attention of one GPU")
        rates, notes = measure_rates(works, device, shares.until("rates"), on_progress)
        found = replace(found, rates=rates, unmeasured=(*found.unmeasured, *notes))
    if found.curves or found.rates:
        try:
            write_measured(machine, found, cache)
        except OSError as error:
            on_step(f"what was measured is not kept for the next time: {error}")
    return found.of(machine)


class _Shares:
    """Time until an end, in parts; what one leaves goes to those behind it."""

    def __init__(self, weights: Mapping[str, float], until_s: float) -> None:
        self._left, self._until_s = dict(weights), until_s

    def until(self, part: str) -> float:
        """Until when `part`, which begins now, may take."""
        weight, now_s = self._left.pop(part), time.monotonic()
        return now_s + (self._until_s - now_s) * weight / (weight + sum(self._left.values()))

    def skip(self, part: str) -> None:
        del self._left[part]


class Survey:
    """All curves of a machine.

    Attributes:
        curves: that were measured.
    """

    def __init__(
        self,
        machine: Machine,
        make: MakeEngine,
        sizes: Sequence[int],
        shares: _Shares,
        until_s: float,
        on_step: OnStep,
        on_progress: OnProgress,
    ) -> None:
        assert not isinstance(machine.gpus, Unknown)
        self._machine, self._make, self._shares = machine, make, shares
        self._until_s, self._on_step, self._on_progress = until_s, on_step, on_progress
        self.curves: list[Curve] = []
        self._notes: list[str] = []
        self._refused: dict[tuple[str, str], list[str]] = {}  # (means, why) -> operations
        self._lost: Counter[str] = Counter()
        self._crew: Crew | None = None
        self._crews = 0
        self._number = 0
        self._sizes = self._fitting(sizes)
        self._members = [_member(machine, place) for place in range(len(machine.gpus))]
        self._area_bytes = 0

    def _fitting(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those for which all GPUs have memory left."""
        assert not isinstance(self._machine.gpus, Unknown)
        free = min(gpu.free_bytes for gpu in self._machine.gpus)
        most = max((free - _SPARE_BYTES) // _AREAS, min(sizes))
        fitting = tuple(size for size in sizes if size <= most)
        if len(fitting) < len(sizes):
            self._notes.append(
                f"beyond {format_bytes(fitting[-1])}: of one GPU {format_bytes(free)} are free"
            )
        return fitting

    def run(self) -> None:
        """Measure, part by part."""
        everyone = [member.rank for member in self._members]
        self._area_bytes = area_bytes(self._trials(everyone), GUARD_BYTES)
        self._on_step(f"starting a process for each of {len(everyone)} GPUs")
        try:
            crew = self._ready()
        except Lost as error:
            self._notes.append(f"how GPUs talk: {error}")
            return
        for rank, why in crew.refused.items():
            self._notes.append(f"GPU {rank}: {why}")
        self._members = [member for member in self._members if member.rank in crew.present]
        for source, target in sorted(denied(self._machine)):
            self._refuse("access to each other's memory", "the driver denies it",
                         f"{source},{target}")  # fmt: skip
        trials = self._trials(crew.present) if crew.present else ()
        for part in SHARES:
            self._part(part, [trial for trial in trials if trial.part == part])

    def _trials(self, ranks: Sequence[int]) -> tuple[Trial, ...]:
        return trials_of(self._machine, ranks, self._sizes)

    def _part(self, part: str, trials: Sequence[Trial]) -> None:
        if not trials:
            self._shares.skip(part)
            return
        until_s = self._shares.until(part)
        granted_s = until_s - time.monotonic()
        self._on_step(f"measuring {part}: {len(trials)} curves, at most {granted_s:.0f} s")
        for number, trial in enumerate(trials):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                self._notes.append(
                    f"{part}: {len(trials) - number} of {len(trials)} curves were not reached in"
                    f" {granted_s:.0f} s"
                )
                break
            # Twice its share, so that a slow one leaves something to the others.
            self._try(trial, time.monotonic() + min(left_s, 2 * left_s / (len(trials) - number)))
            self._on_progress(number + 1, len(trials))

    def _try(self, trial: Trial, until_s: float) -> None:
        if self._lost[trial.means] >= _MOST_LOST:
            self._refuse(trial.means, "left alone after failing before", _where(trial))
            return
        try:
            crew = self._ready()
            if not set(trial.gpus) <= set(crew.present):
                raise Lost("a GPU is not there any more")
            self._measure(crew, trial, until_s)
        except Lost as error:
            self._lost[trial.means] += 1
            self._refuse(trial.means, str(error), _where(trial))
            self.end()

    def _ready(self) -> Crew:
        """The processes, new ones where the last were lost. Raises Lost."""
        if self._crew is None:
            if self._crews == _MOST_CREWS:
                raise Lost(f"processes had to be started anew {_MOST_CREWS} times")
            self._crews += 1
            until_s = min(self._until_s, time.monotonic() + _LONGEST_START_S)
            self._crew = Crew(self._members, self._area_bytes, self._make, until_s)
        return self._crew

    def _measure(self, crew: Crew, trial: Trial, until_s: float) -> None:
        """One curve. Raises Lost where the processes are of no more use."""
        limit_s = min(self._until_s, time.monotonic() + _LONGEST_PREPARE_S)
        answers = crew.ask(trial.gpus, Prepare(trial), limit_s)
        refused = [answer.why for answer in answers.values() if isinstance(answer, Refused)]
        if refused:
            self._refuse(trial.means, refused[0], _where(trial))
            return
        points: list[tuple[int, float]] = []
        wrong = ""
        for size in trial.bytes:
            longest_s = _guess(points, size)
            calls = max(1, min(_MOST_CALLS, round(_TIMED_S / longest_s)))
            if time.monotonic() + longest_s * (1 + calls * _SAMPLES) > until_s and points:
                reached = format_bytes(points[-1][0])
                self._refuse(trial.means, f"too slow to go beyond {reached}", _where(trial))
                break
            seconds, wrong = self._point(crew, trial, size, calls, longest_s)
            if wrong:
                break
            points.append((size, seconds))
        self._keep(trial, points, wrong)

    def _point(
        self, crew: Crew, trial: Trial, size: int, calls: int, longest_s: float
    ) -> tuple[float, str]:
        """Seconds of a transfer, of the slowest rank; what was wrong with what arrived, before
        which nothing is timed."""
        self._number += 1
        limit_s = min(
            self._until_s, time.monotonic() + _LONGEST_ANSWER_S + 10 * longest_s * calls * _SAMPLES
        )
        inner_s = limit_s - 1.0  # ranks that wait for others tell before they are given up
        order = Verify(trial, size, self._number, crew.next_stage(2), inner_s)
        problems = _sound(crew.ask(trial.gpus, order, limit_s)).values()
        wrong = next((problem for problem in problems if problem), "")
        if wrong:
            return 0.0, f"at {format_bytes(size)}: {wrong}"
        clock = Clock(
            trial, size, self._number, calls, _SAMPLES, crew.next_stage(2 * _SAMPLES), inner_s
        )
        answers = _sound(crew.ask(trial.gpus, clock, limit_s))
        wrong = next((problem for _, problem in answers.values() if problem), "")
        taken = zip(*(seconds for seconds, _ in answers.values()), strict=True)
        seconds = statistics.median(max(sample) for sample in taken)
        return seconds, f"at {format_bytes(size)}, many in a row: {wrong}" if wrong else ""

    def _keep(self, trial: Trial, points: Sequence[tuple[int, float]], wrong: str) -> None:
        if not points and not wrong:
            return
        source = f"{MEASURED_HERE}: {wrong}" if wrong else MEASURED_HERE + self._detail(trial)
        curve = Curve(
            trial.means,
            trial.operation,
            trial.gpus,
            trial.at_once,
            tuple(size for size, _ in points),
            tuple(seconds for _, seconds in points),
            not wrong,
            source,
        )
        self.curves.append(curve)
        if wrong:
            self._on_step(f"{name_of(curve)}: wrong data arrives, it will not be used ({wrong})")

    def _detail(self, trial: Trial) -> str:
        if trial.means != NCCL:
            return ""
        steering = [f"{n}={v}" for n, v in self._machine.environment.items() if "NCCL_" in n]
        how = "with " + " ".join(steering) if steering else "as it comes"
        return f", NCCL {how}, bf16, {len(trial.gpus)} ranks"

    def _refuse(self, means: str, why: str, where: str) -> None:
        self._refused.setdefault((means, why), []).append(where)

    def notes(self) -> list[str]:
        """What was not measured, and why."""
        refused = [
            f"{means}, {'; '.join(dict.fromkeys(where))}: {why}"
            for (means, why), where in self._refused.items()
        ]
        return [*self._notes, *refused]

    def end(self) -> None:
        """End all processes."""
        crew, self._crew = self._crew, None
        if crew is not None:
            self._notes += crew.end()


def _guess(points: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds that a transfer may take, by those before: small ones hardly grow."""
    if not points:
        return 1e-3
    before, seconds = points[-1]
    return seconds * (size / before if size > _SMALL_BYTES else 2.0)


def _sound(answers: Mapping[int, Any]) -> Mapping[int, Any]:
    """Raises Lost where one broke down in the middle: the others cannot be in step with it."""
    for rank, answer in answers.items():
        if isinstance(answer, Refused):
            raise Lost(f"GPU {rank}: {answer.why}")
    return answers


def _where(trial: Trial) -> str:
    return f"{trial.operation} over {','.join(map(str, trial.gpus))}"


def _member(machine: Machine, place: int) -> Member:
    assert not isinstance(machine.gpus, Unknown)
    gpu, nodes = machine.gpus[place], machine.host.numa_nodes
    cpus: tuple[int, ...] = ()
    if not isinstance(nodes, Unknown):
        cpus = next((node.cpus for node in nodes if node.number == gpu.numa_node), ())
    return Member(place, "" if isinstance(gpu.bus_id, Unknown) else gpu.bus_id, cpus)
