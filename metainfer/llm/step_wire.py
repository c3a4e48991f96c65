"""Steps on their way to other ranks: plain tuples, which pickle is quick with, and of the block
table of each slot only what is new since the last step.

A table grows by a block in 128 tokens, and at a million tokens it has 8,192.
"""

from __future__ import annotations

from typing import TypeAlias

from metainfer.llm.request import Request
from metainfer.llm.step import SequenceStep, Step, StepKind

Blocks: TypeAlias = tuple[int, ...]
_Row: TypeAlias = tuple[str, int, int, Blocks, int, Blocks, int, bool, bool]
"""As a `SequenceStep`, but of its blocks how many are known, and those that follow."""

Packed: TypeAlias = tuple[
    int, str, list[_Row], int, tuple[str, ...], tuple[Request, ...], tuple[str, ...]
]
"""As a `Step`."""


class StepSender:
    """Used by one thread, for receivers that get all that it makes, in its order."""

    def __init__(self) -> None:
        self._sent: dict[int, Blocks] = {}

    def packed(self, step: Step) -> Packed:
        rows = [self._row(part) for part in step.sequences]
        return (
            step.step_id,
            step.kind.value,
            rows,
            step.num_decode_sequences,
            step.preempted,
            step.admitted,
            step.forgotten,
        )

    def _row(self, part: SequenceStep) -> _Row:
        blocks = part.blocks
        sent = self._sent.get(part.state_slot, ())
        self._sent[part.state_slot] = blocks
        known = len(sent) if sent is blocks or blocks[: len(sent)] == sent else 0
        return (
            part.request_id,
            part.state_slot,
            known,
            () if sent is blocks else blocks[known:],
            part.start,
            part.token_ids,
            part.sample_rows,
            part.prompt_logprobs,
            part.resets_state,
        )


class StepReceiver:
    """Restores what a `StepSender` has packed. Tables that did not change stay one object."""

    def __init__(self) -> None:
        self._have: dict[int, Blocks] = {}

    def unpacked(self, packed: Packed) -> Step:
        step_id, kind, rows, decoding, preempted, admitted, forgotten = packed
        parts = tuple(map(self._part, rows))
        return Step(step_id, StepKind(kind), parts, decoding, preempted, admitted, forgotten)

    def _part(self, row: _Row) -> SequenceStep:
        request_id, slot, known, blocks, start, tokens, samples, scored, resets = row
        if known:  # all that is there: a table that changed is told from its start
            have = self._have[slot]
            blocks = (*have, *blocks) if blocks else have
        self._have[slot] = blocks
        return SequenceStep(request_id, slot, blocks, start, tokens, samples, scored, resets)
