"""Ranks that are threads of one process, for code that is written against a group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

_LONGEST_S = 30.0


class ThreadRanks:
    """What `comm.group.Group` offers for plain objects.

    Attributes:
        exchanges: how often this rank talked to the others.
    """

    def __init__(self, rank: int, size: int, board: list[Any], barrier: Barrier) -> None:
        self.rank = rank
        self.size = size
        self.exchanges = 0
        self._board = board
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any] | None:
        self.exchanges += 1
        self._board[self.rank] = value
        self._barrier.wait(_LONGEST_S)
        found = list(self._board) if self.rank == 0 else None
        self._barrier.wait(_LONGEST_S)
        return found

    def broadcast(self, value: Any) -> Any:
        self.exchanges += 1
        if self.rank == 0:
            self._board[0] = value
        self._barrier.wait(_LONGEST_S)
        found = self._board[0]
        self._barrier.wait(_LONGEST_S)
        return found


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` returns on each of `size` ranks."""
    board: list[Any] = [None] * size
    barrier = Barrier(size)
    ranks = [ThreadRanks(rank, size, board, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, ranks))
