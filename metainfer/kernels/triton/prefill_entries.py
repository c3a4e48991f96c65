"""What the kernels of sparse prefill read entries from: caches, or numbers decoded once before.

A chunk of prefill looks at each entry many times over (8,192 rows with 512 entries each look 400
times at each of 10,240). Entries that are kept as bytes are therefore decoded once, where memory of
at most `MOST_DECODED_BYTES` holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metainfer.kernels.triton.key_rows import decoded
from metainfer.kernels.triton.launch import Launcher
from metainfer.ops.attention import DENSE, AttentionCase

MOST_DECODED_BYTES = 5 * 2**28
"""1.25 GiB: what the entries of a million tokens of V3.2 or GLM-5 take."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Attributes:
    rows: cache rows, or decoded numbers; None where there are none. Bytes where `coded` names a
        format.
    table: cache rows by sequence and number; None where each sequence's lie in order.
    table_stride: rows (of the table, or of `rows` without one) from one sequence to the next.
    columns: entries of a sequence at most.
    """

    rows: torch.Tensor | None
    table: torch.Tensor | None
    table_stride: int
    columns: int
    coded: str = DENSE


def readable(
    launch: Launcher,
    case: AttentionCase,
    positions_T: torch.Tensor,
    entries: torch.Tensor | None,
    entry_rows_BE: torch.Tensor | None,
    sequence_T: torch.Tensor | None,
) -> Entries:
    """The entries of a call as numbers where they are, or fit in memory when decoded."""
    if entries is None or entry_rows_BE is None or not entry_rows_BE.numel():
        return Entries(None, None, 0, 0)
    sequences, columns = entry_rows_BE.shape
    kept = Entries(entries, entry_rows_BE, entry_rows_BE.stride(0), columns, case.entry_format)
    nbytes = 2 * case.key_width * sequences * columns
    if case.entry_format == DENSE or nbytes > MOST_DECODED_BYTES or not len(positions_T):
        return kept
    seen_T = ((positions_T + 1) // case.ratio).clamp(max=columns)
    if sequence_T is None:
        seen_B = seen_T.amax(0, keepdim=True)
    else:
        seen_B = seen_T.new_zeros(sequences).scatter_reduce_(0, sequence_T, seen_T, "amax")
    numbers = decoded(
        launch, case.entry_format, entries, entry_rows_BE, seen_B, case.width, case.rope_extra
    )
    return Entries(numbers, None, columns, columns)
