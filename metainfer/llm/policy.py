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


class NewestFirst:
    """The newest gives way to those before it, so the oldest always gets to its end."""

    def choose(self, running: Ordered[Sequence], needy: Sequence) -> Sequence | None:
        newest = running[-1]
        return newest if newest.order > needy.order else None


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of one scheduler."""

    order: QueueOrder = field(default_factory=FirstComeFirstServed)
    split: BudgetSplit = field(default_factory=SharedBudget)
    victim: VictimChoice = field(default_factory=NewestFirst)
    drafter: Drafter | None = None
