"""StepInputs: the device tensors of one step, as the model sees them.

Built by `llm.batch`, the only place with index arithmetic. Rows of all sequences lie one after the
other; sequences with few rows (decode, speculation) come first.

Shape suffixes: T rows of the step, B sequences, M blocks of the longest sequence, R rows with
logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass.

    Attributes:
        token_ids_T: int64.
        positions_T: int64, position of each row in its sequence.
        sequence_T: int64, index into the B sequences.
        row_starts: B + 1 host integers; sequence b owns rows [row_starts[b], row_starts[b + 1]).
        computed: B host integers, tokens of each sequence in the cache before this step.
        state_slots_B: int64, block of the SEQUENCE-scope kinds that each sequence owns.
        block_table_BM: int64, blocks of the TOKENS-scope kinds, -1 where there is none.
        num_decode_sequences: the first so many sequences are short: their rows are written into
            the rings first and then attend to the rings (at most 1 + draft rows each).
        logits_rows_R: int64, rows whose logits are wanted.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    sequence_T: torch.Tensor
    row_starts: tuple[int, ...]
    computed: tuple[int, ...]
    state_slots_B: torch.Tensor
    block_table_BM: torch.Tensor
    num_decode_sequences: int
    logits_rows_R: torch.Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.computed)

    @property
    def num_decode_rows(self) -> int:
        return self.row_starts[self.num_decode_sequences]
