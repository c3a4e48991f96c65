"""Which rank computes which tokens of a prefill step, where prefill is sharded over tokens.

The tokens of a step, one prompt after the other, are cut into pieces of nearly equal length, two
for each rank, which are dealt there and back: 0 1 2 3 3 2 1 0. Causal work grows with the position,
so a rank that has an early piece has a late one too. All cuts lie at multiples of BLOCK_TOKENS in
a prompt, so that no window of a compressor lies on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.core.errors import MetainferError

_PIECES = 2  # for each rank


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of one prompt: the positions first .. stop - 1, at least one."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions first .. stop - 1 of one prompt, all on the rank `owner`."""

    owner: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def units(chunks: Sequence[Chunk]) -> int:
    """Parts into which the tokens can be cut at most."""
    return sum(_units(chunk) for chunk in chunks)


def deal(chunks: Sequence[Chunk], ranks: int) -> tuple[tuple[Run, ...], ...]:
    """For each chunk its runs, ascending; neighbours have different owners.

    Every rank has tokens, and no rank more than BLOCK_TOKENS for each piece above another, apart
    from what the ends of chunks lack to whole units.

    Raises:
        MetainferError: the chunks have fewer units than there are ranks.
    """
    total = units(chunks)
    if total < ranks:
        raise MetainferError(f"{total} units of tokens cannot be dealt to {ranks} ranks")
    pieces = ranks * (_PIECES if total >= ranks * _PIECES else 1)
    dealt = []
    begin = 0  # unit of the step
    for chunk in chunks:
        runs: list[Run] = []
        for unit in range(_units(chunk)):
            piece = (begin + unit) * pieces // total
            turn, place = divmod(piece, ranks)
            owner = ranks - 1 - place if turn % 2 else place
            first, stop = _unit(chunk, unit)
            if runs and runs[-1].owner == owner:
                first = runs.pop().first
            runs.append(Run(owner, first, stop))
        begin += _units(chunk)
        dealt.append(tuple(runs))
    return tuple(dealt)


def _units(chunk: Chunk) -> int:
    return -(-chunk.stop // BLOCK_TOKENS) - chunk.first // BLOCK_TOKENS


def _unit(chunk: Chunk, number: int) -> tuple[int, int]:
    """First and end of the unit `number` of a chunk."""
    block = chunk.first // BLOCK_TOKENS + number
    first, stop = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
    return max(first, chunk.first), min(stop, chunk.stop)
