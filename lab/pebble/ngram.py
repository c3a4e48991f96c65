"""An interpolated Witten-Bell n-gram model over token ids below 4,096: what simple counting gives.

p(w | h) = (c(h w) + t(h) p(w | h')) / (c(h) + t(h)), with c counts, t(h) the number of different
tokens seen after h, and h' the context h without its first token; below all a uniform choice.
"""

import numpy as np

BITS = 12  # an n-gram of up to five tokens fits in 64 bits


class Ngrams:
    """Counts of every n-gram of `tokens` up to `order`."""

    def __init__(self, tokens: np.ndarray, order: int, vocabulary: int) -> None:
        self.order, self.vocabulary = order, vocabulary
        self.tables = []
        for n in range(1, order + 1):
            keys, counts = np.unique(packed(tokens, n), return_counts=True)
            contexts, first = np.unique(keys >> np.uint64(BITS), return_index=True)
            edges = np.append(first, len(keys))
            seen = np.add.reduceat(counts, first)
            self.tables.append((keys, counts, contexts, seen, np.diff(edges)))

    def nats(self, tokens: np.ndarray) -> np.ndarray:
        """-log p of every token [T] given up to order - 1 before it; of the first given none."""
        p = np.full(len(tokens), 1.0 / self.vocabulary)
        for n, (keys, counts, contexts, seen, kinds) in enumerate(self.tables, 1):
            grams = packed(tokens, n)
            at = slice(n - 1, None)
            count = found(keys, counts, grams)
            context = grams >> np.uint64(BITS)
            c, t = found(contexts, seen, context), found(contexts, kinds, context)
            known = c > 0
            lower = p[at]
            p[at] = np.where(known, (count + t * lower) / np.maximum(c + t, 1), lower)
        return -np.log(p)


def packed(tokens: np.ndarray, n: int) -> np.ndarray:
    """Every n-gram as one number, [T - n + 1] uint64, the last token lowest."""
    size = len(tokens) - n + 1
    out = np.zeros(size, np.uint64)
    for i in range(n):
        out = (out << np.uint64(BITS)) | tokens[i : i + size].astype(np.uint64)
    return out


def found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of `wanted` in the sorted `keys`, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
