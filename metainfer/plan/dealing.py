"""Deal: which rank computes which tokens of a prompt, where prefill is sharded over tokens.

Tokens are dealt in blocks at places that do not depend on how a prompt is cut into chunks, one
block after the other round over the ranks. Causal work grows with the position, so round dealing
keeps ranks even to within one block a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.core.errors import MetainferError


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions first .. stop - 1 of one sequence, at least one."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Deal:
    """Attributes:
    ranks: over which tokens are dealt.
    tokens: of a block; windows of compressors, whose spans divide BLOCK_TOKENS, lie within one.
    """

    ranks: int
    tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.tokens < 1 or self.tokens % BLOCK_TOKENS:
            raise MetainferError(
                f"blocks of {self.tokens} tokens cannot be dealt to {self.ranks} ranks: a block is"
                f" a multiple of {BLOCK_TOKENS} tokens"
            )

    def owner(self, position: int) -> int:
        """The rank that computes the token at `position`."""
        return position // self.tokens % self.ranks

    def blocks(self, first: int, stop: int) -> Iterator[tuple[int, Run]]:
        """(owner, run) of each block of the positions first .. stop - 1, ascending."""
        while first < stop:
            end = min(stop, (first // self.tokens + 1) * self.tokens)
            yield self.owner(first), Run(first, end)
            first = end

    def runs(self, first: int, stop: int, rank: int) -> tuple[Run, ...]:
        """What `rank` computes of them, ascending; blocks that touch are one run."""
        runs: list[Run] = []
        for owner, run in self.blocks(first, stop):
            if owner != rank:
                continue
            touches = runs and runs[-1].stop == run.first
            runs.append(Run(runs.pop().first, run.stop) if touches else run)
        return tuple(runs)

    def counts(self, first: int, stop: int) -> tuple[int, ...]:
        """Tokens of each rank."""
        counts = [0] * self.ranks
        for owner, run in self.blocks(first, stop):
            counts[owner] += len(run)
        return tuple(counts)
