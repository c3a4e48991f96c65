"""Runner: executes steps on one rank: state, forward pass, sampling, prompt log-probabilities.

Knows requests only by what their sampling needs. Which request runs when is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from metainfer.llm.batch import BatchBuilder, has_unread
from metainfer.llm.flight import Flight
from metainfer.llm.graphs import DecodeSteps, Graphs, Shape
from metainfer.llm.sample import Draws, Row, Sampler, SequenceSampling
from metainfer.llm.step import IN_FLIGHT, SequenceStep, Step, StepOutput
from metainfer.nn.inputs import DecodeInputs, StepInputs
from metainfer.plan.step_bytes import PROMPT_LOGITS_BYTES


class Cache(Protocol):
    """What the runner needs of `nn.cache.CacheStorage`."""

    def reset_slots(self, slots: Sequence[int]) -> None: ...


C = TypeVar("C", bound=Cache)
C_contra = TypeVar("C_contra", bound=Cache, contravariant=True)


class Model(Protocol[C_contra]):
    """What the runner needs of a model."""

    def forward(self, inputs: StepInputs | DecodeInputs, cache: C_contra) -> torch.Tensor | None:
        """Residual streams of the rows that are wanted, [W, S, D]; None where they have gone on to
        another stage."""

    def logits(self, streams_RSD: torch.Tensor) -> torch.Tensor:
        """Logits, fp32 [R, V]."""


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """How decode steps run in fixed shapes, for a cache with a spare slot and block.

    Attributes:
        row_sizes, block_sizes: see `llm.graphs.DecodeSteps`.
        graphs: makes graphs of them; None for none.
    """

    row_sizes: tuple[int, ...]
    block_sizes: tuple[int, ...]
    graphs: Graphs | None = None


class Runner(Generic[C]):
    """Used by one thread, which is the only one that touches the cache.

    Args:
        fixed: None where every step is computed in shapes of its own.
        draws: False where another stage has the head: steps give nothing here.

    Attributes:
        draws: as given.
    """

    def __init__(
        self,
        model: Model[C],
        cache: C,
        *,
        sampler: Sampler,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_slots: int,
        max_blocks: int,
        device: torch.device,
        fixed: FixedShapes | None = None,
        draws: bool = True,
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        last_tokens_S = sampler.last_tokens_S if draws else None
        self._batch = BatchBuilder(num_slots, max_blocks, device, last_tokens_S)
        self._slice_rows = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))
        self._states: dict[str, SequenceSampling] = {}
        self.draws = draws
        self.decode_steps: DecodeSteps[C] | None = None
        if fixed is not None:
            self.decode_steps = DecodeSteps(
                model,
                cache,
                self._batch.tables_NM,
                spare_slot=self._batch.spare_slot,
                vocab_size=vocab_size if draws else 0,
                row_sizes=fixed.row_sizes,
                block_sizes=fixed.block_sizes,
                graphs=fixed.graphs,
            )

    def execute(self, step: Step) -> StepOutput:
        """Launch `step` and wait for its results."""
        return self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, step: Step) -> Flight:
        """Have the rows of `step` computed and sampled; on a GPU that is queued, and nothing waits
        for it. Raises what the model raises: then no sequence of the step has moved."""
        for request_id in step.forgotten:
            self._states.pop(request_id, None)
        for request in step.admitted:
            self._states[request.request_id] = SequenceSampling(request, self._eos_token_ids)
        fresh = [part.state_slot for part in step.sequences if part.resets_state]
        if fresh:
            self._cache.reset_slots(fresh)
        logits_RV, streams = self._compute(step)
        states = [self._states[part.request_id] for part in step.sequences]
        kept = [
            own if part.prompt_logprobs else None
            for part, own in zip(step.sequences, streams, strict=True)
        ]
        return Flight(step, states, self._draw(step, logits_RV), kept, self._add_prompt_logprobs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Before the first request: sample in all forms, run decode steps of all fixed shapes, and
        make their graphs."""
        if self.draws:
            self._sampler.warm_up()
        if self.decode_steps is not None:
            self.decode_steps.capture()

    @property
    def decodes_without_graph(self) -> int:
        """Decode steps so far whose graph is missing."""
        return 0 if self.decode_steps is None else self.decode_steps.num_missed

    def forget_all(self) -> None:
        """No request is known any more."""
        self._states.clear()

    def dry_run(self, step: Step) -> None:
        """Execute a step that belongs to nobody, before the first request. All its sequences must
        be admitted by it."""
        self.execute(step)
        self._states.clear()

    @torch.inference_mode()
    def rehearse(self, step: Step) -> None:
        """Start all that a step which belongs to nobody starts, and what its results would; wait
        for nothing, so that tensors may have no numbers."""
        for part, own_NSD in zip(step.sequences, self.launch(step).streams, strict=True):
            if part.prompt_logprobs and own_NSD is not None:
                for slice_NSD in own_NSD.split(self._slice_rows):
                    logits_NV = self._model.logits(slice_NSD)
                    self._sampler.launch_logprobs(logits_NV, [0] * len(logits_NV), 1)
        self._states.clear()

    @torch.inference_mode()
    def rehearse_shape(self, shape: Shape) -> None:
        """The same of a decode step of a fixed shape."""
        assert self.decode_steps is not None
        self.decode_steps.rehearse(shape)

    @torch.inference_mode()
    def rehearse_draws(self) -> None:
        """The same of sampling."""
        self._sampler.launch_all_forms()

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is lost: after an error of the accelerator nothing on it can be
        trusted. Running out of memory is not fatal."""
        return isinstance(error, torch.AcceleratorError)

    def _compute(self, step: Step) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """Logits of the rows that are sampled, in the order of the step, and the streams of each
        sequence where log-probabilities of its prompt are made of them. None of either where
        another stage has them."""
        shape = self.decode_steps.shape_of(step) if self.decode_steps is not None else None
        if self.decode_steps is not None and shape is not None:
            numbers = self._batch.decode_rows(step, shape.rows)
            read = self._batch.read if has_unread(step) else None
            logits_TV = self.decode_steps.run(shape, numbers, read)
            logits_RV = self._sampled(step, logits_TV) if self.draws else None
            return logits_RV, [None] * len(step.sequences)
        if self.decode_steps is not None:
            self.decode_steps.note_shapeless(step)
        inputs = self._batch.build(step)
        streams_WSD = self._model.forward(inputs, self._cache)
        if streams_WSD is None:
            return None, [None] * len(step.sequences)
        logits_RV = None
        if len(inputs.logits_rows_R):
            logits_RV = self._model.logits(streams_WSD.index_select(0, inputs.logits_rows_R))
        counts = inputs.wanted_counts or [len(part.token_ids) for part in step.sequences]
        return logits_RV, streams_WSD.split(list(counts))

    def _sampled(self, step: Step, logits_TV: torch.Tensor) -> torch.Tensor:
        """The logits of rows that are sampled, of those of all rows of a decode step."""
        if all(part.sample_rows == len(part.token_ids) for part in step.sequences):
            return logits_TV[: step.num_rows]
        rows: list[int] = []
        end = 0
        for part in step.sequences:
            end += len(part.token_ids)
            rows += range(end - part.sample_rows, end)
        return logits_TV.index_select(0, self._batch.sent(rows))

    def _draw(self, step: Step, logits_RV: torch.Tensor | None) -> Draws | None:
        """A draw for each sampled row, in the order of the step; None where there are none."""
        rows: list[Row] = []
        for part in step.sequences:
            state, end = self._states[part.request_id], part.start + len(part.token_ids)
            # What is sampled of one row is taken for granted in those behind it.
            taken = part.token_ids[len(part.token_ids) - part.sample_rows + 1 :]
            unread = tuple(token for token in part.token_ids if token == IN_FLIGHT)
            rows += [
                Row(state, end - part.sample_rows + i + 1, unread + taken[:i], part.state_slot)
                for i in range(part.sample_rows)
            ]
        return None if not rows or logits_RV is None else self._sampler.launch(logits_RV, rows)

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
            targets = prompt[begin + 1 : stop + 1]
            tops = [wanted] * (stop - begin)
            state.prompt_logprobs += self._sampler.token_logprobs(logits_NV, targets, tops)
        return None
