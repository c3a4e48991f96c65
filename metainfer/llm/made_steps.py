"""Made-up steps: what a plan allows to happen in one step, by size. No torch.

They belong to nobody: what they write into slots and blocks is cleared or overwritten by requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.step import SequenceStep, Step, StepKind
from metainfer.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Room:
    """The most that steps of a plan may have.

    Attributes:
        tokens: of a sequence.
        rows: of a step; of one sequence no more than `tokens`.
        sequences: of a step.
        block_tokens: of a block.
    """

    tokens: int
    rows: int
    sequences: int
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def of(cls, plan: Plan) -> Room:
        tokens = min(plan.max_model_len.value, plan.num_blocks.value * plan.block_tokens) - 1
        most = plan.max_num_batched_tokens.value
        sequences = min(plan.max_num_seqs.value, most)
        return cls(tokens, min(most, tokens), sequences, plan.block_tokens)

    def step(self, parts: Iterable[SequenceStep], num_decode_sequences: int = 0) -> Step:
        return step(parts, num_decode_sequences, self.block_tokens)

    def mixed(self, tokens: int, count: int, place: int, rows: int) -> Step:
        """The last rows of a prompt of so many tokens beside sequences that decode at a place."""
        decoding = [decode(slot, place) for slot in range(1, 1 + count)]
        return self.step([*decoding, prefill(tokens, min(rows, tokens))], count)


@dataclass(frozen=True, slots=True)
class Family:
    """Steps that differ in one size, from 1 to `most`. `beside`: rows besides those of the size."""

    name: str
    most: int
    make: Callable[[int], Step]
    beside: int = 0


def families(room: Room) -> Iterator[Family]:
    """All ways in which steps grow, but for decode steps of fixed shapes."""
    yield Family("a prompt from its start", room.rows, lambda n: room.step([prefill(n, n)]))
    yield Family("the end of a prompt", room.rows, lambda n: room.step([prefill(room.tokens, n)]))
    yield Family("a scored prompt", room.rows, lambda n: room.step([scored(prefill(n, n))]))
    beside = min(room.sequences, room.rows - 1) - 1
    if beside < 1:
        return
    yield Family(
        "the end of a prompt beside all that decode",
        room.rows - beside,
        partial(room.mixed, room.tokens, beside, room.tokens),
        beside,
    )
    for count in dict.fromkeys((1, beside)):
        yield Family(
            f"a prompt beside {count} that decode at a place",
            room.tokens,
            partial(short_beside, room, count),
        )
    for place in dict.fromkeys((min(BLOCK_TOKENS, room.tokens), room.tokens)):
        yield Family(
            f"a prompt beside some that decode at {place}",
            beside,
            partial(short_beside, room, place=place),
            beside=2,
        )


def short_beside(room: Room, count: int, place: int) -> Step:
    """The shortest prompt that is not a row beside sequences that decode at a place."""
    return room.mixed(min(2, room.tokens), count, place, 2)


def prefill(tokens: int, rows: int) -> SequenceStep:
    """The last rows of a sequence of so many tokens, in slot 0."""
    return _part(0, tokens - rows, rows)


def decode(slot: int, tokens: int) -> SequenceStep:
    """The last row of a sequence of so many tokens. All share the same blocks."""
    return _part(slot, tokens - 1, 1)


def scored(part: SequenceStep) -> SequenceStep:
    """With log-probabilities of its prompt."""
    return replace(part, prompt_logprobs=True)


def step(
    parts: Iterable[SequenceStep], num_decode_sequences: int = 0, block_tokens: int = BLOCK_TOKENS
) -> Step:
    sequences = tuple(
        replace(
            part, blocks=tuple(range(blocks_for(part.start + len(part.token_ids), block_tokens)))
        )
        for part in parts
    )
    kind = StepKind.DECODE if num_decode_sequences else StepKind.PREFILL
    # Drawn at random: greedy rows take less.
    sampling = SamplingParams(top_p=0.9, seed=0)
    requests = tuple(Request(part.request_id, (0,), sampling, 0.0) for part in sequences)
    return Step(0, kind, sequences, num_decode_sequences, admitted=requests)


def _part(slot: int, start: int, rows: int) -> SequenceStep:
    return SequenceStep(
        request_id=f"warm-up {slot}",
        state_slot=slot,
        blocks=(),
        start=start,
        token_ids=(0,) * rows,
        sample_rows=1,
        resets_state=True,
    )
