"""Runner: executes one step on one rank: state, forward pass, sampling, prompt log-probabilities.

Knows requests only by what their sampling needs. Which request runs when is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from metainfer.llm.batch import BatchBuilder
from metainfer.llm.sample import Draw, Row, SequenceSampling, sample, token_logprobs
from metainfer.llm.step import SequenceOutput, SequenceStep, Step, StepOutput
from metainfer.nn.inputs import StepInputs
from metainfer.plan.ledger import PROMPT_LOGITS_BYTES


class Cache(Protocol):
    """What the runner needs of `nn.cache.CacheStorage`."""

    def reset_slots(self, slots: Sequence[int]) -> None: ...


C = TypeVar("C", bound=Cache)
C_contra = TypeVar("C_contra", bound=Cache, contravariant=True)


class Model(Protocol[C_contra]):
    """What the runner needs of a model."""

    def forward(self, inputs: StepInputs, cache: C_contra) -> torch.Tensor:
        """Residual streams of all rows, [T, S, D]."""

    def logits(self, streams_RSD: torch.Tensor) -> torch.Tensor:
        """Logits, fp32 [R, V]."""


class Runner(Generic[C]):
    """Used by one thread, which is the only one that touches the cache."""

    def __init__(
        self,
        model: Model[C],
        cache: C,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_slots: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._eos_token_ids = eos_token_ids
        self._batch = BatchBuilder(num_slots, max_blocks, device)
        self._slice_rows = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))
        self._states: dict[str, SequenceSampling] = {}

    @torch.inference_mode()
    def execute(self, step: Step) -> StepOutput:
        """Compute the rows of `step` and sample; a sequence whose logits are not finite gets an
        error of its own. Raises what the model raises: then no sequence of the step has moved."""
        for request_id in step.forgotten:
            self._states.pop(request_id, None)
        for request in step.admitted:
            self._states[request.request_id] = SequenceSampling(request, self._eos_token_ids)
        fresh = [part.state_slot for part in step.sequences if part.resets_state]
        if fresh:
            self._cache.reset_slots(fresh)
        inputs = self._batch.build(step)
        streams_TSD = self._model.forward(inputs, self._cache)
        draws = self._draw(step, inputs, streams_TSD)
        outputs: list[SequenceOutput] = []
        drawn = 0
        for index, part in enumerate(step.sequences):
            own_NSD = streams_TSD[inputs.row_starts[index] : inputs.row_starts[index + 1]]
            outputs.append(self._output(part, draws[drawn : drawn + part.sample_rows], own_NSD))
            drawn += part.sample_rows
        return StepOutput(step.step_id, tuple(outputs))

    def dry_run(self, step: Step) -> None:
        """Execute a step that belongs to nobody, before the first request. All its sequences must
        be admitted by it."""
        self.execute(step)
        self._states.clear()

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is lost: after an error of the accelerator nothing on it can be
        trusted. Running out of memory is not fatal."""
        return isinstance(error, torch.AcceleratorError)

    def _draw(self, step: Step, inputs: StepInputs, streams_TSD: torch.Tensor) -> list[Draw]:
        """A draw for each sampled row, in the order of the step."""
        rows = [
            Row(
                self._states[part.request_id],
                part.start + len(part.token_ids) - part.sample_rows + i + 1,
                part.token_ids[len(part.token_ids) - part.sample_rows + 1 :][:i],
            )
            for part in step.sequences
            for i in range(part.sample_rows)
        ]
        if not rows:
            return []
        return sample(self._model.logits(streams_TSD[inputs.logits_rows_R]), rows)

    def _output(
        self, part: SequenceStep, draws: list[Draw], streams_NSD: torch.Tensor
    ) -> SequenceOutput:
        """What `part` gave; `streams_NSD` are its own rows."""
        state = self._states[part.request_id]
        accepted, error = _accept(draws, part.token_ids)
        prompt_logprobs = None
        if part.prompt_logprobs and error is None:
            error = self._add_prompt_logprobs(state, part, streams_NSD)
            if error is None and len(state.prompt_logprobs) == state.num_prompt:
                prompt_logprobs = tuple(state.prompt_logprobs)
        if error is not None:
            return SequenceOutput(part.request_id, error=error)
        tokens = tuple(draw.token_id for draw in accepted)
        state.accept(tokens)
        logprobs = tuple(draw.logprob for draw in accepted if draw.logprob is not None)
        return SequenceOutput(part.request_id, tokens, logprobs, prompt_logprobs)

    def _add_prompt_logprobs(
        self, state: SequenceSampling, part: SequenceStep, streams_NSD: torch.Tensor
    ) -> str | None:
        """Log-probabilities of the prompt tokens that follow this chunk's rows, slice by slice;
        those already known (before a preemption) are not made again. Returns an error or None."""
        prompt = state.request.prompt_token_ids
        wanted = state.params.prompt_logprobs or 0
        first = len(state.prompt_logprobs) - 1  # the position whose row comes next
        end = min(part.start + len(part.token_ids), state.num_prompt - 1)
        for begin in range(first, end, self._slice_rows):
            stop = min(begin + self._slice_rows, end)
            logits_NV = self._model.logits(streams_NSD[begin - part.start : stop - part.start])
            if not bool(torch.isfinite(logits_NV.sum())):
                return "the model's logits for this prompt are not finite numbers"
            targets = torch.tensor(prompt[begin + 1 : stop + 1], device=logits_NV.device)
            state.prompt_logprobs += token_logprobs(logits_NV, targets, [wanted] * (stop - begin))
        return None


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
