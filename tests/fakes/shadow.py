"""A stand-in for model and cache that remembers, per block and slot, which tokens were written.

It answers every step with tokens that depend on the whole sequence alone, and complains if a step
would read anything but the tokens that its sequence has written. A token in flight is the last one
that it has drawn for the slot.
"""

from __future__ import annotations

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.core.events import TokenLogprob
from metainfer.llm.request import Request
from metainfer.llm.step import IN_FLIGHT, SequenceOutput, SequenceStep, Step, StepOutput


def next_token(tokens: tuple[int, ...], vocab_size: int) -> int:
    """The token that this model says follows `tokens`."""
    return hash((17, *tokens)) % vocab_size


class ShadowRunner:
    """Executes steps of the scheduler on a shadow cache."""

    def __init__(self, vocab_size: int, max_rows: int, draft_rows: int = 0) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.draft_rows = draft_rows
        self.blocks: dict[int, list[int | None]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.last_drawn: dict[int, tuple[str, int]] = {}  # by slot: for whom, and what
        self.num_unread = 0
        self.requests: dict[str, Request] = {}
        self.rows_computed = 0

    def execute(self, step: Step) -> StepOutput:
        assert 0 < step.num_rows <= self.max_rows
        for request_id in step.forgotten:
            self.requests.pop(request_id, None)  # a failed step may never have come here
        for request in step.admitted:
            assert request.request_id not in self.requests
            self.requests[request.request_id] = request
        short = [len(s.token_ids) <= 1 + self.draft_rows for s in step.sequences]
        assert short == sorted(short, reverse=True)
        assert sum(short) == step.num_decode_sequences
        ids = [s.request_id for s in step.sequences]
        assert len(set(ids)) == len(ids) and not set(ids) & set(step.preempted)
        self.rows_computed += step.num_rows
        return StepOutput(step.step_id, tuple(self._sequence(s) for s in step.sequences))

    def _sequence(self, part: SequenceStep) -> SequenceOutput:
        if part.resets_state:
            self.slots[part.state_slot] = ()
        assert part.resets_state == (part.start == 0)
        before = self.slots[part.state_slot]
        assert len(before) >= part.start, "the rings lack tokens"
        before = before[: part.start]
        for position in range(part.start):
            block = self.blocks[part.blocks[position // BLOCK_TOKENS]]
            assert block[position % BLOCK_TOKENS] == before[position], "a block was overwritten"
        token_ids = self._read(part)
        for position, token in enumerate(token_ids, part.start):
            block = self.blocks.setdefault(
                part.blocks[position // BLOCK_TOKENS], [None] * BLOCK_TOKENS
            )
            block[position % BLOCK_TOKENS] = token
        written = before + token_ids
        self.slots[part.state_slot] = written
        prompt = self.requests[part.request_id].prompt_token_ids
        assert written[: len(prompt)] == prompt[: len(written)]
        drawn = self._sample(written, part.sample_rows)
        if drawn:
            self.last_drawn[part.state_slot] = part.request_id, drawn[-1]
        return SequenceOutput(
            part.request_id,
            drawn,
            prompt_logprobs=self._prompt_logprobs(part, prompt),
        )

    def _read(self, part: SequenceStep) -> tuple[int, ...]:
        """The tokens of the rows of `part`."""
        if IN_FLIGHT not in part.token_ids:
            return part.token_ids
        assert part.token_ids == (IN_FLIGHT,) and part.start > 0
        owner, token = self.last_drawn[part.state_slot]
        assert owner == part.request_id, "the last token of the slot is another sequence's"
        self.num_unread += 1
        return (token,)

    def _sample(self, written: tuple[int, ...], sample_rows: int) -> tuple[int, ...]:
        """Draws behind each sampled row, as long as the drafts in the following rows are right."""
        drawn: list[int] = []
        for row in range(len(written) - sample_rows, len(written)):
            drawn.append(next_token(written[: row + 1], self.vocab_size))
            if row + 1 < len(written) and written[row + 1] != drawn[-1]:
                break
        return tuple(drawn)

    def _prompt_logprobs(
        self, part: SequenceStep, prompt: tuple[int, ...]
    ) -> tuple[TokenLogprob | None, ...] | None:
        if not part.prompt_logprobs or part.start + len(part.token_ids) < len(prompt):
            return None
        return (None, *(TokenLogprob(token, -1.0) for token in prompt[1:]))
