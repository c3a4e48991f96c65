"""TokenCounts: which tokens a sequence has seen, for penalties."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class TokenCounts:
    """How often each token occurs in the output; tokens of the prompt count 0 but are listed."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        ids = list(dict.fromkeys(prompt_token_ids))
        self._index = {token_id: i for i, token_id in enumerate(ids)}
        self._ids: np.ndarray = np.array(ids, dtype=np.int64)
        self._counts: np.ndarray = np.zeros(len(ids), dtype=np.float32)

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            room = max(16, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[index] = token_id
        self._counts[index] += 1

    @property
    def ids(self) -> np.ndarray:
        """int64, each id once; like `counts` good until the next one is added."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """float32, of `ids`."""
        return self._counts[: len(self._index)]
