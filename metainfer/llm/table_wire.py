"""Block tables on their way to other ranks: of each slot only what is new since the last step.

A table grows by a block in 128 tokens, and at a million tokens it has 8,192.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from metainfer.llm.step import SequenceStep, Step


class TableSender:
    """Used by one thread, for receivers that get all that it makes, in its order."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, ...]] = {}

    def shortened(self, step: Step) -> tuple[Step, tuple[int, ...]]:
        """`step` with the ends of block tables alone, and how many blocks of each are known."""
        known = [self._known(part) for part in step.sequences]
        parts = [
            part if count == 0 else replace(part, blocks=part.blocks[count:])
            for part, count in zip(step.sequences, known, strict=True)
        ]
        return replace(step, sequences=tuple(parts)), tuple(known)

    def _known(self, part: SequenceStep) -> int:
        sent = self._sent.get(part.state_slot, ())
        self._sent[part.state_slot] = part.blocks
        if sent is part.blocks:
            return len(sent)
        return len(sent) if part.blocks[: len(sent)] == sent else 0


class TableReceiver:
    """Restores what a `TableSender` has shortened. Tables that did not change stay one object."""

    def __init__(self) -> None:
        self._have: dict[int, tuple[int, ...]] = {}

    def restored(self, step: Step, known: Sequence[int]) -> Step:
        parts = [
            self._restored(part, count) for part, count in zip(step.sequences, known, strict=True)
        ]
        return replace(step, sequences=tuple(parts))

    def _restored(self, part: SequenceStep, known: int) -> SequenceStep:
        if known:  # all that is there: a table that changed is told from its start
            have = self._have[part.state_slot]
            part = replace(part, blocks=(*have, *part.blocks) if part.blocks else have)
        self._have[part.state_slot] = part.blocks
        return part
