"""StepInputs: the device tensors of one step, as the model sees them.

Built by `llm.batch`, the only place with index arithmetic. Rows of all sequences lie one after the
other; sequences with few rows (decode, speculation) come first.

Shape suffixes: T rows of the step, B sequences, M blocks of the longest sequence, W rows whose
streams are wanted, R rows with logits, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Numbers: TypeAlias = npt.NDArray[np.int64]


def sent(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """On `device`, by a copy for which nothing waits."""
    return on_host(numbers, device).to(device, non_blocking=True)


def on_host(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """In memory from which copies to `device` do not wait. What is freed before it was copied is
    kept until then (by torch's allocator of pinned memory)."""
    values = torch.from_numpy(numbers)
    return values.pin_memory() if device.type == "cuda" else values


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass.

    Attributes:
        token_ids_T: int64.
        positions_T: int64, position of each row in its sequence.
        sequence_T: int64, index into the B sequences.
        row_starts: B + 1 host integers; sequence b owns rows [row_starts[b], row_starts[b + 1]).
        computed: B host integers, tokens of each sequence in the cache before this step.
        slots: B host integers, block of the SEQUENCE-scope kinds that each sequence owns.
        state_slots_B: int64, the same.
        block_table_BM: int64, blocks of the TOKENS-scope kinds, -1 where there is none.
        num_decode_sequences: the first so many sequences are short: their rows are written into
            the rings first and then attend to the rings (at most 1 + draft rows each).
        logits_rows_R: int64, which of the W rows have logits.
        wanted_counts: B host integers, how many of the last rows of each sequence have streams that
            are wanted: all of those that decode. None where all rows are.
        wanted_rows_W: int64, these rows; None where all rows are.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    sequence_T: torch.Tensor
    row_starts: tuple[int, ...]
    computed: tuple[int, ...]
    slots: tuple[int, ...]
    state_slots_B: torch.Tensor
    block_table_BM: torch.Tensor
    num_decode_sequences: int
    logits_rows_R: torch.Tensor
    wanted_counts: tuple[int, ...] | None = None
    wanted_rows_W: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.computed)

    @property
    def num_decode_rows(self) -> int:
        return self.row_starts[self.num_decode_sequences]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a forward pass of decode rows alone, in shapes that do not depend on what they
    hold, so that a CUDA graph may be made of it. All numbers are on the device.

    Rows of one sequence are written into its rings first and then attend to them, as in StepInputs.
    A row at position -1 is padding: it sees nothing, and what it writes goes to the spare slot and
    block of the cache.

    Attributes:
        token_ids_T: int64.
        positions_T: int64, position of each row in its sequence, or -1.
        slots_T: int64, block of the SEQUENCE-scope kinds of each row's sequence; the spare one of
            padding.
        tables_NM: int64, blocks of the TOKENS-scope kinds of each slot's sequence; what lies behind
            its last block is never looked at. M blocks hold the longest sequence.
        may_pad: whether there can be padding.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    tables_NM: torch.Tensor
    may_pad: bool = True
