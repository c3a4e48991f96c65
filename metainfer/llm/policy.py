"""Policies of the scheduler: in which order, how a step's rows are split, who is preempted.

Each is a small object that the scheduler asks; none of them touches blocks or queues. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Protocol

from metainfer.llm.request import Request
from metainfer.llm.sequence import Sequence


class QueueOrder(Protocol):
    def key(self, request: Request, arrival: int) -> tuple[int, int]:
        """Smaller is served earlier. `arrival` counts requests, so that keys are all different;
        a preempted request keeps its key."""


class BudgetSplit(Protocol):
    def decode_rows(self, budget: int, prefill_waits: bool) -> int:
        """Rows of a step that decoding sequences may take, out of `budget` >= 2."""

    def prefill_rows(self, pending: Ordered[int], budget: int) -> list[int]:
        """Rows for each prefilling sequence, at most `pending` each and `budget` together. They
        come in queue order, and the first gets at least one."""


class Pace(Protocol):
    """Of prompts, while other sequences decode. Seconds are those of whole steps."""

    def prefill_rows(self, budget: int) -> int:
        """Rows that prompts may have in the next step, `budget` at most."""

    def began(self, step_id: int, decode_rows: int, prefill_rows: int) -> None:
        """A step was made."""

    def took(self, step_id: int, seconds: float) -> None:
        """A step is over. Steps of which this is never said are left out of account."""


class VictimChoice(Protocol):
    def choose(self, running: Ordered[Sequence], needy: Sequence) -> Sequence | None:
        """Who of `running` (in queue order) gives up its cache so that `needy` can go on, or None:
        then `needy` waits. The first in the queue order is never chosen."""


class Drafter(Protocol):
    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Up to `most` guesses of the tokens that follow `sequence.tokens`."""


class FirstComeFirstServed:
    """By priority, then by arrival."""

    def key(self, request: Request, arrival: int) -> tuple[int, int]:
        return request.priority, arrival


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """Decode first, but never all of it; prompts share the rest.

    Decoding sequences get what they need up to `decode_share` of the rows while a prompt waits, so
    a prompt always moves on. Of the rows for prompts the oldest prompt has one half for sure, and
    the other half goes to the shortest remainder, so that a short prompt need not sit out a long
    one and a long one cannot be starved by a stream of short ones.
    """

    decode_share: float = 0.75

    def decode_rows(self, budget: int, prefill_waits: bool) -> int:
        if not prefill_waits:
            return budget
        return min(max(1, int(budget * self.decode_share)), budget - 1)

    def prefill_rows(self, pending: Ordered[int], budget: int) -> list[int]:
        shares = [0] * len(pending)
        if not pending or budget <= 0:
            return shares
        shares[0] = min(pending[0], (budget + 1) // 2)
        left = budget - shares[0]
        for i in sorted(range(len(pending)), key=lambda i: pending[i] - shares[i]):
            more = min(pending[i] - shares[i], left)
            shares[i] += more
            left -= more
        return shares


class Unhurried:
    """Prompts have all rows that are left."""

    def prefill_rows(self, budget: int) -> int:
        return budget

    def began(self, step_id: int, decode_rows: int, prefill_rows: int) -> None:
        pass

    def took(self, step_id: int, seconds: float) -> None:
        pass


class TimeShare:
    """Decoding gets a share of the time, and no step keeps it waiting for long.

    A step with rows of prompts owes decoding so much time that its share is right; until steps of
    decoding alone have paid it off, prompts wait. While others decode, rows of prompts are no more
    than take `longest_s` at the speed at which the last ones were computed. A step that is not over
    counts with the time that it should take.

    Args:
        share: of the time, at least 0, below 1.
        longest_s: of a step with rows of prompts.
    """

    def __init__(self, share: float, longest_s: float) -> None:
        self._owed_per_s = share / (1.0 - share)
        self._longest_s = longest_s
        self._owed_s = 0.0
        self._prefill_rows_per_s = 0.0
        self._decode_s = 0.0
        self._running: dict[int, tuple[int, int, float]] = {}  # by step: rows, what was counted

    def prefill_rows(self, budget: int) -> int:
        if self._owed_s > 0.0:
            return 0
        if not self._prefill_rows_per_s:
            return budget
        rows = int(self._prefill_rows_per_s * self._longest_s)
        return min(budget, max(_FEWEST_PREFILL_ROWS, rows))

    def began(self, step_id: int, decode_rows: int, prefill_rows: int) -> None:
        seconds = self._decode_s
        if prefill_rows:
            rate = self._prefill_rows_per_s
            seconds = prefill_rows / rate if rate else 0.0
        before_s = self._owed_s
        self._count(self._debt(decode_rows, prefill_rows, seconds), decode_rows)
        self._running[step_id] = decode_rows, prefill_rows, self._owed_s - before_s

    def took(self, step_id: int, seconds: float) -> None:
        decode_rows, prefill_rows, counted_s = self._running.pop(step_id)
        self._running = {other: of for other, of in self._running.items() if other > step_id}
        if prefill_rows >= _FEWEST_PREFILL_ROWS:
            self._prefill_rows_per_s = prefill_rows / max(seconds, 1e-9)
        elif not prefill_rows:
            self._decode_s = seconds
        self._count(self._debt(decode_rows, prefill_rows, seconds) - counted_s, decode_rows)

    def _debt(self, decode_rows: int, prefill_rows: int, seconds: float) -> float:
        """What a step adds to the time that decoding is owed."""
        if not decode_rows:
            return 0.0
        return seconds * self._owed_per_s if prefill_rows else -seconds

    def _count(self, seconds: float, decode_rows: int) -> None:
        most = _MOST_STEPS_OWED * self._longest_s * self._owed_per_s
        # Nothing is owed to nobody, and time that was not needed is not saved up.
        self._owed_s = min(max(0.0, self._owed_s + seconds), most) if decode_rows else 0.0


class NewestFirst:
    """The newest gives way to those before it, so the oldest always gets to its end."""

    def choose(self, running: Ordered[Sequence], needy: Sequence) -> Sequence | None:
        newest = running[-1]
        return newest if newest.order > needy.order else None


_FEWEST_PREFILL_ROWS = 16
"""Fewer say nothing about speed, and are never asked for."""
_MOST_STEPS_OWED = 4
"""One step that took ever so long does not keep prompts waiting ever so long."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one scheduler."""

    order: QueueOrder = field(default_factory=FirstComeFirstServed)
    split: BudgetSplit = field(default_factory=SharedBudget)
    pace: Pace = field(default_factory=Unhurried)
    victim: VictimChoice = field(default_factory=NewestFirst)
    drafter: Drafter | None = None
