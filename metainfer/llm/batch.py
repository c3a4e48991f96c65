"""Batch: Step -> the tensors of one forward pass, the only place with index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from metainfer.llm.step import IN_FLIGHT, SequenceStep, Step
from metainfer.nn.inputs import StepInputs


class BatchBuilder:
    """Builds the inputs of steps; the result depends on the step alone.

    Block tables of all slots stay on the device. A step sends what is new in them, which is a block
    in 128 tokens for a sequence that decodes. Nothing here waits for the device.

    Args:
        last_tokens_S: int64 on the device, by slot, with one more for the spare one: the token that
            was sampled last, for which IN_FLIGHT stands; None where no step has that.

    Attributes:
        spare_slot: the slot behind those of sequences; its table names no block.
        tables_NM: int64, blocks of each slot's sequence, then -1.
    """

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        device: torch.device,
        last_tokens_S: torch.Tensor | None = None,
    ) -> None:
        self._device = device
        self._last_tokens_S = last_tokens_S
        self.spare_slot = num_slots
        self.tables_NM = torch.full((num_slots + 1, max_blocks), -1, device=device)
        self._written: list[tuple[int, ...]] = [()] * num_slots

    def build(self, step: Step) -> StepInputs:
        """Inputs of a step of any kind."""
        self.write_tables(step)
        token_ids: list[int] = []
        positions: list[int] = []
        sequence_of_row: list[int] = []
        slots: list[int] = []
        wanted_rows: list[int] = []
        logits_rows: list[int] = []  # places among those
        row_starts = [0]
        wanted_counts = _wanted_counts(step)
        for index, part in enumerate(step.sequences):
            rows = len(part.token_ids)
            token_ids += part.token_ids
            positions += range(part.start, part.start + rows)
            sequence_of_row += [index] * rows
            slots.append(part.state_slot)
            end = row_starts[-1] + rows
            row_starts.append(end)
            wanted_rows += range(end - wanted_counts[index], end)
            logits_rows += range(len(wanted_rows) - part.sample_rows, len(wanted_rows))
        longest = max(len(part.blocks) for part in step.sequences)
        # One copy to the device for all vectors.
        parts = (token_ids, positions, sequence_of_row, slots, logits_rows, wanted_rows)
        vectors = self.sent([number for part in parts for number in part])
        tokens_T, positions_T, sequence_T, slots_B, logits_rows_R, wanted_rows_W = vectors.split(
            [len(part) for part in parts]
        )
        if has_unread(step):
            self.read(tokens_T, slots_B.index_select(0, sequence_T))
        wants_all = len(wanted_rows) == len(token_ids)
        return StepInputs(
            token_ids_T=tokens_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            row_starts=tuple(row_starts),
            computed=tuple(part.start for part in step.sequences),
            state_slots_B=slots_B,
            block_table_BM=self.tables_NM[:, :longest].index_select(0, slots_B),
            num_decode_sequences=step.num_decode_sequences,
            logits_rows_R=logits_rows_R,
            wanted_counts=None if wants_all else wanted_counts,
            wanted_rows_W=None if wants_all else wanted_rows_W,
        )

    def decode_rows(self, step: Step, rows: int) -> torch.Tensor:
        """int64 [3 * rows] on the host: tokens, positions and slots of a decode step, each followed
        by padding. The block tables are sent."""
        self.write_tables(step)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for part in step.sequences:
            tokens += part.token_ids
            positions += range(part.start, part.start + len(part.token_ids))
            slots += [part.state_slot] * len(part.token_ids)
        padding = rows - len(tokens)
        tokens += [0] * padding
        positions += [-1] * padding
        return self._host([*tokens, *positions, *slots, *[self.spare_slot] * padding])

    def read(self, tokens_T: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Put the tokens that only the device knows where IN_FLIGHT stands for them."""
        assert self._last_tokens_S is not None
        last_T = self._last_tokens_S.index_select(0, slots_T)
        tokens_T.copy_(torch.where(tokens_T == IN_FLIGHT, last_T, tokens_T))

    def write_tables(self, step: Step) -> None:
        """Send what is new in the block tables of the sequences of `step`."""
        for part in step.sequences:
            if part.blocks is not self._written[part.state_slot]:
                self._write_table(part)

    def sent(self, numbers: Sequence[int]) -> torch.Tensor:
        """int64 on the device."""
        return self._host(numbers).to(self._device, non_blocking=True)

    def _write_table(self, part: SequenceStep) -> None:
        known, blocks = self._written[part.state_slot], part.blocks
        first = len(known) if blocks[: len(known)] == known else 0
        numbers = [*blocks[first:], *[-1] * (len(known) - len(blocks))]
        row_M = self.tables_NM[part.state_slot, first : first + len(numbers)]
        row_M.copy_(self._host(numbers), non_blocking=True)
        self._written[part.state_slot] = blocks

    def _host(self, numbers: Sequence[int]) -> torch.Tensor:
        """int64 in memory from which copies to the device do not wait. What is freed before it was
        copied is kept until then (by torch's allocator of pinned memory)."""
        # numpy reads a list four times as fast as torch does: 0.7 ms for a chunk of 8,192 rows.
        values = torch.from_numpy(np.array(numbers, np.int64))
        return values.pin_memory() if self._device.type == "cuda" else values


def has_unread(step: Step) -> bool:
    """Whether a token of `step` is known to the device alone."""
    return any(part.token_ids[0] == IN_FLIGHT for part in step.sequences)


def _wanted_counts(step: Step) -> tuple[int, ...]:
    """How many of the last rows of each sequence something is read of after the last layer: the
    sampled ones, and all that decode or give log-probabilities of a prompt. One at least in all, so
    that no layer sees a step without rows."""
    counts = [
        len(part.token_ids)
        if index < step.num_decode_sequences or part.prompt_logprobs
        else part.sample_rows
        for index, part in enumerate(step.sequences)
    ]
    if not any(counts):
        counts[-1] = 1
    return tuple(counts)
