"""Runs checks in processes of their own (`processes`): results are compared by several at once,
since compiling takes most of the time; calls are timed by one alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from metainfer.kernels.processes import Numbered, in_processes, require_a_sound_device
from metainfer.ops.base import Load
from metainfer.ops.floor import Rates
from metainfer.ops.kernel_order import REFERENCE

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes at which each operation is checked.

    Attributes:
        prefill_rows: of a step of prefill.
        decode_batches: rows of steps of decode.
        entries: of context, or tokens where a case has no entries.
    """

    prefill_rows: int
    decode_batches: tuple[int, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(cls, device: str) -> Sizes:
        """Those that are taken where nobody says otherwise."""
        if device == "cpu":
            return cls(64, (1, 4), (2048,))
        return cls(2048, (1, 4), (2048, 32768, 131072))

    def cover(self, other: Sizes) -> bool:
        """Whether these leave out none of the other sizes."""
        return (
            self.prefill_rows >= other.prefill_rows
            and set(self.decode_batches) >= set(other.decode_batches)
            and set(self.entries) >= set(other.entries)
        )


class State(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"  # the time did not reach it
    NOT_VERIFIED = "not verified"  # a reference runs: there is nothing to hold it against


@dataclass(frozen=True, slots=True)
class Check:
    """One operation at one case and size.

    Attributes:
        phase: "prefill" or "decode".
        backend: which is checked; "" for the one that the order chooses.
    """

    op: str
    case: Any
    phase: str
    load: Load
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check.

    Attributes:
        backend: which ran; "" where none would.
        error: largest difference over the largest number expected.
        problem: what is wrong, in a few words; "" where nothing is.
        seconds: median of a call; None where it was not timed.
    """

    backend: str
    error: float
    problem: str
    seconds: float | None = None

    @property
    def state(self) -> State:
        if self.problem:
            return State.FAILED
        return State.NOT_VERIFIED if self.backend == REFERENCE else State.PASSED


@dataclass(frozen=True, slots=True)
class Where:
    """What a worker runs on; see `platform.platform`.

    Attributes:
        cache_dtype: of caches that hold plain numbers.
        named: which GPU, such as "cuda:1"; None for the first.
    """

    device: str
    code_for: str | None
    order: str
    seed: int
    cache_dtype: str = "bfloat16"
    named: str | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a worker may take.

    Attributes:
        most_bytes: of the device; None: as much as there is.
        shared: others take theirs at the same time; a check that needs more can have it later.
    """

    most_bytes: int | None
    shared: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """Attributes:
    outcomes: in the order of the checks; None where the time did not reach one.
    rates: of the device; None where the time did not reach them.
    """

    outcomes: tuple[Outcome | None, ...]
    rates: Rates | None


def verify(
    where: Where,
    checks: Sequence[Check],
    workers: int,
    on_progress: Progress,
    budget_s: float | None = None,
    memory_bytes: int | None = None,
) -> Verified:
    """Compare and time all checks.

    Args:
        workers: processes that compare at once.
        budget_s: no check is begun after it.
        memory_bytes: of the device, that all workers may take together; each has its share, and a
            check that needs more is compared alone when the others are done. None: no bound.
    """
    until_s = None if budget_s is None else time.monotonic() + budget_s
    outcomes: dict[int, Outcome] = {}
    rates: list[Rates] = []
    steps = iter(range(1, 2 * len(checks) + 1))

    crowded: list[int] = []  # checks for which a share did not suffice

    def compared(number: int, outcome: Outcome | None) -> None:
        if outcome is None:
            crowded.append(number)
            return
        outcomes[number] = outcome
        on_progress(next(steps), 2 * len(checks))

    def crashed(number: int, why: str) -> None:
        compared(number, Outcome(checks[number].backend, float("inf"), why))

    def clocked(number: int, result: Any) -> None:
        if isinstance(result, Rates):
            rates.append(result)
        elif isinstance(result, str):
            cannot_be_timed(number, result)
        else:
            outcomes[number] = replace(outcomes[number], seconds=result)
            on_progress(next(steps), 2 * len(checks))

    def cannot_be_timed(number: int, why: str) -> None:
        outcomes[number] = replace(outcomes[number], problem=f"cannot be timed: {why}")
        on_progress(next(steps), 2 * len(checks))

    numbered = list(enumerate(checks))
    shares = [numbered[n::workers] for n in range(workers)]
    room = Room(None if memory_bytes is None else memory_bytes // workers, workers > 1)
    in_processes(_compare, (where, room), shares, compared, crashed, until_s)
    large = [numbered[number] for number in sorted(crowded)]
    in_processes(_compare, (where, Room(memory_bytes, False)), [large], compared, crashed, until_s)
    good = [
        (number, replace(one, backend=outcomes[number].backend))
        for number, one in numbered
        if number in outcomes and outcomes[number].state is State.PASSED
    ]
    in_processes(_clock, where, [good], clocked, cannot_be_timed, until_s)
    ordered = tuple(outcomes.get(number) for number, _ in numbered)
    return Verified(ordered, rates[0] if rates else None)


def _compare(
    connection: Connection, common: tuple[Where, Room], checks: Sequence[Numbered]
) -> None:
    """Sends the outcome of each check, or None where a share of the memory did not suffice."""
    from metainfer.kernels.memory_bound import NoRoomError, bound_memory
    from metainfer.kernels.platform import platform
    from metainfer.kernels.verify import check

    where, room = common
    on = platform(where.named or where.device, where.code_for)
    if room.most_bytes is not None:
        bound_memory(where.device, room.most_bytes)
    for number, one in checks:
        outcome: Outcome | None = None
        try:
            outcome = check(on, one, where.order, where.seed, where.cache_dtype)
        except NoRoomError as error:
            if not room.shared:
                outcome = error.outcome
        connection.send((number, outcome))
        require_a_sound_device(where.device)


def _clock(connection: Connection, where: Where, checks: Sequence[Numbered]) -> None:
    from metainfer.kernels.platform import platform
    from metainfer.kernels.verify import clock, rates_of

    on = platform(where.named or where.device, where.code_for)
    connection.send((-1, rates_of(on)))
    for number, one in checks:
        try:
            connection.send((number, clock(on, one, one.backend, where.seed, where.cache_dtype)))
        except RuntimeError as error:
            connection.send((number, str(error).splitlines()[0][:200]))
        require_a_sound_device(where.device)
