"""Batch: Step -> StepInputs, the only place with index arithmetic."""

from __future__ import annotations

import torch

from metainfer.llm.step import Step
from metainfer.nn.inputs import StepInputs


class BatchBuilder:
    """Builds the inputs of steps.

    Keeps the block tables of all slots on the host, so that a decode step copies rows of a matrix
    instead of walking through blocks; the result depends on the step alone.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self._device = device
        self._tables_NM = torch.full((num_slots, max_blocks), -1, dtype=torch.int64)
        self._written: list[tuple[int, ...]] = [()] * num_slots

    def build(self, step: Step) -> StepInputs:
        token_ids: list[int] = []
        positions: list[int] = []
        sequence_of_row: list[int] = []
        slots: list[int] = []
        logits_rows: list[int] = []
        row_starts = [0]
        for index, part in enumerate(step.sequences):
            rows = len(part.token_ids)
            token_ids += part.token_ids
            positions += range(part.start, part.start + rows)
            sequence_of_row += [index] * rows
            slots.append(part.state_slot)
            end = row_starts[-1] + rows
            logits_rows += range(end - part.sample_rows, end)
            row_starts.append(end)
            if part.blocks is not self._written[part.state_slot]:
                self._write_table(part.state_slot, part.blocks)
        longest = max(len(part.blocks) for part in step.sequences)
        host_slots_B = torch.tensor(slots)
        # One copy to the device for all vectors, one for the table.
        vectors = self._to_device(
            torch.tensor(token_ids + positions + sequence_of_row + slots + logits_rows)
        )
        rows, count = len(token_ids), len(slots)
        tokens_T, positions_T, sequence_T, slots_B, logits_rows_R = vectors.split(
            [rows, rows, rows, count, len(logits_rows)]
        )
        return StepInputs(
            token_ids_T=tokens_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            row_starts=tuple(row_starts),
            computed=tuple(part.start for part in step.sequences),
            state_slots_B=slots_B,
            block_table_BM=self._to_device(self._tables_NM[host_slots_B, :longest]),
            num_decode_sequences=step.num_decode_sequences,
            logits_rows_R=logits_rows_R,
        )

    def _write_table(self, slot: int, blocks: tuple[int, ...]) -> None:
        row_M = self._tables_NM[slot]
        row_M[len(blocks) : len(self._written[slot])] = -1
        row_M[: len(blocks)] = torch.tensor(blocks)
        self._written[slot] = blocks

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)
