"""Step: what the scheduler decided for one forward pass; StepOutput: what came of it.

Plain data, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from metainfer.core.events import TokenLogprob
from metainfer.llm.request import Request

IN_FLIGHT = -2
"""Stands for a token that an earlier step draws, whose result the host does not have yet."""


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The share of one sequence in a step.

    Attributes:
        state_slot: block of the SEQUENCE-scope cache kinds.
        blocks: block table of the TOKENS-scope cache kinds.
        start: tokens already in the cache; the rows computed are start .. start + len(token_ids).
        token_ids: the tokens of these rows; the first may be IN_FLIGHT.
        sample_rows: how many of the last rows need logits for sampling: 0 in the middle of a
            prompt, 1 as a rule, more when drafted tokens are verified.
        prompt_logprobs: logits of all rows are wanted, for log-probabilities of the prompt.
        resets_state: the state slot is new to this sequence: clear it first.
    """

    request_id: str
    state_slot: int
    blocks: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    sample_rows: int
    prompt_logprobs: bool = False
    resets_state: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. Sequences of decode come first.

    Attributes:
        preempted: requests that lost their cache in this step and will be recomputed.
        admitted: requests that run for the first time: what the runner must know to sample them.
        forgotten: requests that ended since the last step; the runner drops what it knows.
    """

    step_id: int
    kind: StepKind
    sequences: tuple[SequenceStep, ...]
    num_decode_sequences: int
    preempted: tuple[str, ...] = ()
    admitted: tuple[Request, ...] = ()
    forgotten: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step gave to one sequence.

    Attributes:
        token_ids: 0 to sample_rows new tokens. With drafted tokens, those that were accepted and
            the one sampled after them.
        logprobs: empty, or one per token.
        prompt_logprobs: all of them, in the step that completes them; None otherwise.
        error: a sentence if this sequence failed; the others of the step are not touched.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a step, in the order of `Step.sequences`."""

    step_id: int
    sequences: tuple[SequenceOutput, ...]
