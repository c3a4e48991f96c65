"""A model and a cache that are small enough to check every index, with logits that depend on all
tokens of the sequence and on nothing else.

The cache remembers tokens: the ring of a slot the last RING of them, blocks all of them. The model
complains if what it reads through slots and block tables is not the sequence's own past.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.nn.inputs import StepInputs

RING = 16
POISON = 3  # behind this token all logits are NaN
BREAK = 4  # this token breaks the whole step


class ToyCache:
    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.ring = torch.full((num_slots * RING,), -1)
        self.tokens = torch.full((num_blocks * BLOCK_TOKENS,), -1)
        self.resets: list[int] = []

    def reset_slots(self, slots: Sequence[int]) -> None:
        self.resets += slots
        self.ring.view(-1, RING)[list(slots)] = -1


class ToyModel:
    """Residual streams are [T, 1, 2]: a number made of all tokens so far, and a NaN or 0."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows_computed = 0
        self.logits_rows: list[int] = []

    def forward(self, inputs: StepInputs, cache: ToyCache) -> torch.Tensor:
        assert len(inputs.token_ids_T) == inputs.row_starts[-1]
        self.rows_computed += inputs.row_starts[-1]
        if BREAK in inputs.token_ids_T.tolist():
            raise RuntimeError("a token broke the model")
        rows = [
            row
            for index in range(inputs.num_sequences)
            for row in self._sequence(inputs, cache, index)
        ]
        streams_TSD = torch.tensor(rows, dtype=torch.float32).view(-1, 1, 2)
        wanted = inputs.wanted_rows_W
        return streams_TSD if wanted is None else streams_TSD[wanted]

    def logits(self, streams_RSD: torch.Tensor) -> torch.Tensor:
        self.logits_rows.append(len(streams_RSD))
        rows = [self._logits(int(row[0, 0])) + row[0, 1] for row in streams_RSD]
        return torch.stack(rows)

    def after(self, tokens: Iterable[int]) -> torch.Tensor:
        """The logits [V] that follow `tokens`, computed without any cache."""
        return self._logits(_digest(tokens))

    def _sequence(
        self, inputs: StepInputs, cache: ToyCache, index: int
    ) -> list[tuple[float, float]]:
        first, end = inputs.row_starts[index], inputs.row_starts[index + 1]
        start, slot = inputs.computed[index], int(inputs.state_slots_B[index])
        assert inputs.positions_T[first:end].tolist() == list(range(start, start + end - first))
        assert inputs.sequence_T[first:end].tolist() == [index] * (end - first)
        table = inputs.block_table_BM[index].tolist()
        held = [block for block in table if block >= 0]
        assert table == held + [-1] * (len(table) - len(held))
        assert BLOCK_TOKENS * len(held) >= start + end - first
        rows = []
        for row in range(first, end):
            position, token = int(inputs.positions_T[row]), int(inputs.token_ids_T[row])
            past = [int(cache.tokens[_place(table, p)]) for p in range(position)]
            ring = [int(cache.ring[slot * RING + p % RING]) for p in range(position)][-RING:]
            assert ring == past[-RING:], "ring and blocks belong to different sequences"
            cache.tokens[_place(table, position)] = token
            cache.ring[slot * RING + position % RING] = token
            rows.append(
                (_digest([*past, token]), float("nan") if POISON in [*past, token] else 0.0)
            )
        return rows

    def _logits(self, digest: int) -> torch.Tensor:
        logits = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(digest))
        logits[[POISON, BREAK]] = -50.0  # it does not poison itself
        return logits


def _place(table: list[int], position: int) -> int:
    return table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def _digest(tokens: Iterable[int]) -> int:
    """A number that fp32 holds exactly."""
    value = 1
    for token in tokens:
        value = (value * 40_503 + token + 1) % 16_777_213
    return value
