"""Flight: a step that the device computes, or has computed, and how its results are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from metainfer.llm.sample import Draw, Draws, SequenceSampling
from metainfer.llm.step import SequenceOutput, SequenceStep, Step, StepOutput

ScorePrompt = Callable[[SequenceSampling, SequenceStep, torch.Tensor], str | None]
"""Adds the log-probabilities of prompt tokens that streams give; returns an error or None."""


class Flight:
    """Read the flights of a runner in the order in which it launched them.

    Args:
        states: of the sequences of `step`, which may have been forgotten since.
        draws: of all its sampled rows; None where there are none.
        streams: of each sequence the rows that log-probabilities of its prompt are made of.
        score_prompt: makes them; waits for the device, and for steps that were launched since.

    Attributes:
        streams: as given.
    """

    def __init__(
        self,
        step: Step,
        states: Sequence[SequenceSampling],
        draws: Draws | None,
        streams: Sequence[torch.Tensor | None],
        score_prompt: ScorePrompt,
    ) -> None:
        self._step = step
        self._states = states
        self._draws = draws
        self.streams = streams
        self._score_prompt = score_prompt

    def wait(self) -> StepOutput:
        """What the step gave, once it is there. A sequence whose logits are not finite gets an
        error of its own."""
        with torch.inference_mode():
            return self._read()

    def _read(self) -> StepOutput:
        draws = [] if self._draws is None else self._draws.wait()
        outputs: list[SequenceOutput] = []
        begin = 0
        for part, state, own_NSD in zip(
            self._step.sequences, self._states, self.streams, strict=True
        ):
            end = begin + part.sample_rows
            outputs.append(self._output(part, state, draws[begin:end], own_NSD))
            begin = end
        return StepOutput(self._step.step_id, tuple(outputs))

    def _output(
        self,
        part: SequenceStep,
        state: SequenceSampling,
        draws: list[Draw],
        streams_NSD: torch.Tensor | None,
    ) -> SequenceOutput:
        """What `part` gave; `streams_NSD` are its own rows."""
        accepted, error = _accept(draws, part.token_ids)
        prompt_logprobs = None
        if part.prompt_logprobs and error is None and streams_NSD is not None:
            error = self._score_prompt(state, part, streams_NSD)
            if error is None and len(state.prompt_logprobs) == state.num_prompt:
                prompt_logprobs = tuple(state.prompt_logprobs)
        if error is not None:
            return SequenceOutput(part.request_id, error=error)
        tokens = tuple(draw.token_id for draw in accepted)
        state.accept(tokens)
        logprobs = tuple(draw.logprob for draw in accepted if draw.logprob is not None)
        return SequenceOutput(part.request_id, tokens, logprobs, prompt_logprobs)


def _accept(draws: list[Draw], token_ids: tuple[int, ...]) -> tuple[list[Draw], str | None]:
    """The draws up to the first that contradicts the draft behind its row (the last `len(draws) -
    1` tokens of `token_ids` are drafts), or an error. A draft is taken when it is what this row
    draws anyway, so that drafting changes no token."""
    accepted: list[Draw] = []
    drafts = token_ids[len(token_ids) - len(draws) + 1 :] if draws else ()
    for i, draw in enumerate(draws):
        if draw.error is not None:
            return [], draw.error
        accepted.append(draw)
        if i < len(drafts) and drafts[i] != draw.token_id:
            break
    return accepted, None
