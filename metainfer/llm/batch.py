"""Batch: Step -> the tensors of one forward pass, the only place with index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from metainfer.llm.step import IN_FLIGHT, SequenceStep, Step
from metainfer.nn.inputs import Numbers, StepInputs, on_host, sent


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
        token_ids: list[Numbers] = []
        positions: list[Numbers] = []
        sequence_of_row: list[Numbers] = []
        wanted_rows: list[Numbers] = []
        logits_rows: list[Numbers] = []  # places among those
        row_starts, wanted_end = [0], 0
        wanted_counts = _wanted_counts(step)
        for index, part in enumerate(step.sequences):
            rows, wanted = len(part.token_ids), wanted_counts[index]
            token_ids.append(np.fromiter(part.token_ids, np.int64, rows))
            positions.append(np.arange(part.start, part.start + rows))
            sequence_of_row.append(np.full(rows, index))
            end, wanted_end = row_starts[-1] + rows, wanted_end + wanted
            row_starts.append(end)
            wanted_rows.append(np.arange(end - wanted, end))
            logits_rows.append(np.arange(wanted_end - part.sample_rows, wanted_end))
        slots = tuple(part.state_slot for part in step.sequences)
        longest = max(len(part.blocks) for part in step.sequences)
        # One copy to the device for all vectors.
        parts = (token_ids, positions, sequence_of_row, [np.array(slots)], logits_rows, wanted_rows)
        vectors = sent(np.concatenate([piece for part in parts for piece in part]), self._device)
        tokens_T, positions_T, sequence_T, slots_B, logits_rows_R, wanted_rows_W = vectors.split(
            [sum(map(len, part)) for part in parts]
        )
        if has_unread(step):
            self.read(tokens_T, slots_B.index_select(0, sequence_T))
        wants_all = wanted_end == row_starts[-1]
        return StepInputs(
            token_ids_T=tokens_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            row_starts=tuple(row_starts),
            computed=tuple(part.start for part in step.sequences),
            slots=slots,
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
        return sent(np.array(numbers, np.int64), self._device)

    def _write_table(self, part: SequenceStep) -> None:
        known, blocks = self._written[part.state_slot], part.blocks
        first = len(known) if blocks[: len(known)] == known else 0
        numbers = [*blocks[first:], *[-1] * (len(known) - len(blocks))]
        row_M = self.tables_NM[part.state_slot, first : first + len(numbers)]
        row_M.copy_(self._host(numbers), non_blocking=True)
        self._written[part.state_slot] = blocks

    def _host(self, numbers: Sequence[int]) -> torch.Tensor:
        """int64, see `nn.inputs.on_host`."""
        return on_host(np.array(numbers, np.int64), self._device)


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
