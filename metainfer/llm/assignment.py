"""Assignment: rows given out in the step that is being put together. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from metainfer.llm.admission import Limits
from metainfer.llm.blocks import InvariantError
from metainfer.llm.sequence import Sequence
from metainfer.llm.step import IN_FLIGHT, SequenceStep


@dataclass(slots=True)
class Assignment:
    """Attributes:
    left: rows that may still be given.
    rows: of each sequence.
    preempted: who lost its cache.
    """

    left: int
    rows: dict[Sequence, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)

    def give(self, sequence: Sequence, rows: int) -> None:
        self.rows[sequence] = rows
        self.left -= rows

    def take_back(self, sequence: Sequence) -> None:
        self.left += self.rows.pop(sequence, 0)
        self.preempted.append(sequence)


def decode_turn(running: Iterable[Sequence], limits: Limits) -> int:
    """Rows that decoding sequences may have in a step: each stage of a pipeline has others."""
    decoding = sum(sequence.pending == 1 for sequence in running)
    return -(-decoding // limits.stages) * (1 + limits.draft_rows)


def sequence_step(sequence: Sequence, rows: int) -> SequenceStep:
    """The share of a sequence that gets so many rows."""
    start, end, known = sequence.computed, sequence.computed + rows, sequence.known
    # The row of the last known token, and those of drafts behind it, are sampled.
    samples = end >= known and sequence.max_total > known
    if sequence.slot is None:
        raise InvariantError(f"request {sequence.request.request_id} runs without a slot")
    read = (*sequence.tokens[start:end], *sequence.drafts[: max(0, end - known)])
    return SequenceStep(
        request_id=sequence.request.request_id,
        state_slot=sequence.slot,
        blocks=sequence.blocks,
        start=start,
        # A token that no result has told yet is the last one, and alone.
        token_ids=read if sequence.unread == 0 else (IN_FLIGHT,),
        sample_rows=end - known + 1 if samples else 0,
        prompt_logprobs=sequence.wants_prompt_logprobs and start < sequence.num_prompt,
        resets_state=start == 0,
    )
