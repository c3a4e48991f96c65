"""Which ring rows a prefill chunk reads and writes: known on the host, so no kernel computes them.

Shape suffixes: P rows of a prefill sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from metainfer.nn.inputs import Numbers, sent


class Ring(NamedTuple):
    """What a chunk needs of one ring.

    Attributes:
        size: rows of a slot.
        first: position of the first token before the chunk that it needs; may be negative.
    """

    size: int
    first: int


class RingRows(NamedTuple):
    """Rows of one ring, int64.

    Attributes:
        halo: of the tokens before the chunk; of those before the sequence other rows of the slot.
        rows_P: of each token of the chunk, -1 for those that later ones overwrite.
        kept: of the last tokens, which stay.
    """

    halo: torch.Tensor
    rows_P: torch.Tensor
    kept: torch.Tensor


class Chunk(NamedTuple):
    """Tokens `start` to `end` of the sequence in `slot`, and its rings."""

    slot: int
    start: int
    end: int
    rings: Sequence[Ring]


def ring_rows(chunks: Sequence[Chunk], device: torch.device) -> list[list[RingRows]]:
    """For each chunk its rows in each of its rings. One copy to the device for all."""
    pieces: list[Numbers] = []
    for slot, start, end, rings in chunks:
        for ring in rings:
            kept = min(end - start, ring.size)
            positions = np.arange(end - kept, end)
            pieces += (
                slot * ring.size + np.arange(ring.first, start) % ring.size,
                np.full(end - start - kept, -1),
                slot * ring.size + positions % ring.size,
            )
    if not pieces:
        return [[] for _ in chunks]
    lengths = [len(piece) for piece in pieces]
    on_device = sent(np.concatenate(pieces), device)
    found, begin = [], 0
    for place in range(0, len(lengths), 3):
        halo, gone, kept = lengths[place : place + 3]
        own = begin + halo
        stop = own + gone + kept
        found.append(
            RingRows(on_device[begin:own], on_device[own:stop], on_device[stop - kept : stop])
        )
        begin = stop
    ends = iter(found)
    return [[next(ends) for _ in chunk.rings] for chunk in chunks]
