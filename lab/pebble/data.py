"""Token files and training rows.

A token file is an .npz with `tokens` uint16, `starts` int64 (one per document, plus the end),
`source` uint8 (per document), `boost` uint8 (per token: 1 marks an answer to recall) and `bytes`
int64 (UTF-8 bytes per document). Documents whose source is RECALL are never cut.
"""

from pathlib import Path

import numpy as np
import torch

SOURCES = ("kjv", "docs", "story", "chat", "recall", "drill")
RECALL = SOURCES.index("recall")
# How often each source is seen for once that the whole is seen.
REPEAT = {"kjv": 0.6, "docs": 0.5, "story": 1.0, "chat": 1.3, "recall": 1.0, "drill": 1.0}
BOOST = 4.0


class Documents:
    def __init__(self, path: str | Path) -> None:
        file = np.load(path)
        self.tokens, self.starts = file["tokens"], file["starts"]
        self.source, self.boost, self.bytes = file["source"], file["boost"], file["bytes"]

    def span(self, document: int) -> slice:
        return slice(int(self.starts[document]), int(self.starts[document + 1]))


class Rows:
    """Endless shuffled rows of length + 1 tokens; recall documents lead a row uncut."""

    def __init__(self, documents: Documents, length: int, seed: int, recall_share: float) -> None:
        self.d, self.length, self.recall_share = documents, length, recall_share
        self.rng = np.random.default_rng(seed)
        size = np.diff(documents.starts)
        self.recall = np.flatnonzero((documents.source == RECALL) & (size <= length + 1))
        self.plain = np.flatnonzero(documents.source != RECALL)
        self.repeat = np.array([REPEAT[s] for s in SOURCES])[documents.source[self.plain]]
        self.stream, self.boost, self.at = np.zeros(0, np.uint16), np.zeros(0, np.uint8), 0

    def refill(self) -> None:
        draws = np.floor(self.repeat + self.rng.random(len(self.plain))).astype(int)
        order = self.rng.permutation(np.repeat(self.plain, draws))
        spans = [self.d.span(n) for n in order]
        rest = slice(self.at, None)
        self.stream = np.concatenate([self.stream[rest], *(self.d.tokens[s] for s in spans)])
        self.boost = np.concatenate([self.boost[rest], *(self.d.boost[s] for s in spans)])
        self.at = 0

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [rows, length + 1] and loss weights fp32 [rows, length]."""
        width = self.length + 1
        ids, boost = np.empty((rows, width), np.int64), np.zeros((rows, width), np.uint8)
        for n in range(rows):
            used = 0
            if len(self.recall) and self.rng.random() < self.recall_share:
                span = self.d.span(self.rng.choice(self.recall))
                used = span.stop - span.start
                ids[n, :used], boost[n, :used] = self.d.tokens[span], self.d.boost[span]
            need = width - used
            while len(self.stream) - self.at < need:
                self.refill()
            part = slice(self.at, self.at + need)
            ids[n, used:], boost[n, used:] = self.stream[part], self.boost[part]
            self.at += need
        weight = 1.0 + (BOOST - 1.0) * boost[:, 1:].astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(weight)


def held_out(documents: Documents, source: str, length: int, most: int):
    """Rows of whole-source text: ids [n, length + 1], weight [n, length], bytes they stand for.

    Predicting a document's first token is not counted; padding repeats token 2 with weight 0.
    """
    ids, size = [], 0
    for n in np.flatnonzero(documents.source == SOURCES.index(source)):
        if len(ids) + documents.starts[n + 1] - documents.starts[n] > most:
            continue
        ids.extend(documents.tokens[documents.span(n)].tolist())
        size += int(documents.bytes[n])
    rows = max(1, -(-(len(ids) - 1) // length))
    flat = np.full(rows * length + 1, 2, np.int64)
    flat[: len(ids)] = ids
    grid = np.lib.stride_tricks.sliding_window_view(flat, length + 1)[::length]
    weight = (grid[:, 1:] > 0) & (grid[:, 1:] != 2)
    return torch.from_numpy(grid.copy()), torch.from_numpy(weight.astype(np.float32)), size


def recall_rows(documents: Documents, length: int, most: int):
    """Held-out recall documents that fit: padded ids [n, length + 1], boost mask [n, length]."""
    ids, mask = [], []
    for n in np.flatnonzero(documents.source == RECALL):
        span = documents.span(n)
        size = span.stop - span.start
        if size <= length + 1 and len(ids) < most:
            ids.append(np.pad(documents.tokens[span].astype(np.int64), (0, length + 1 - size), constant_values=2))
            mask.append(np.pad(documents.boost[span], (0, length + 1 - size))[1:])
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(mask).astype(bool))
