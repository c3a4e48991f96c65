"""Lightning indexer: scores the entries of a sequence and chooses those that a row attends to."""

from __future__ import annotations

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.linear import linear
from metainfer.nn.rows import Rows
from metainfer.nn.step_index import DecodeWindows, PrefillWindows
from metainfer.ops.index import IndexCase
from metainfer.ops.rope import RotateCase


class Indexer:
    """Chooses at most `topk` entries a row. Where a sequence has no more, all are chosen, and no
    query is computed.

    Attributes:
        queries: the product that makes queries of heads.
    """

    def __init__(self, build: LayerBuilder, layer: LayerArch, prefix: str) -> None:
        arch = build.arch
        self._layer = layer.index
        self._heads, self._width = arch.index_num_heads, arch.index_head_dim
        self._topk = arch.index_topk
        self.queries = linear(build, f"{prefix}.wq_b")
        rotate = RotateCase(self._heads, self._width, arch.rope_head_dim, dtype=build.dtype)
        self._rotate = build.kernel("rope.rotate", rotate)
        case = IndexCase(self._heads, self._width, self._topk, layer.ratio, build.dtype)
        self._choose = build.kernel("attention.index_topk", case)
        self._choose_decode = build.kernel("attention.index_topk_decode", case)

    def decode(
        self,
        q_rank: Rows,
        weights_TH: torch.Tensor,
        rotation_TR2: torch.Tensor,
        windows: DecodeWindows,
        cache: CacheStorage,
    ) -> torch.Tensor | None:
        """int64 [T, K], rows of the entries that each decode row attends to, -1 where there is
        none; None where no row sees any."""
        entry_rows_TE = windows.entry_rows_TE
        if entry_rows_TE is None or windows.num_entries <= self._topk:
            return entry_rows_TE
        q_THI = self._rotated_queries(q_rank, rotation_TR2)
        keys_MI = cache.rows(Kind.INDEX_KEYS, self._layer)
        ids_TK = self._choose_decode(q_THI, weights_TH, keys_MI, entry_rows_TE, None)
        # Entries and index keys lie in the same rows; -1 becomes the last column, which holds -1.
        return entry_rows_TE.gather(1, ids_TK % entry_rows_TE.shape[1])

    def prefill(
        self,
        q_rank: Rows,
        weights_PH: torch.Tensor,
        rotation_PR2: torch.Tensor,
        windows: PrefillWindows,
        positions_P: torch.Tensor,
        cache: CacheStorage,
    ) -> torch.Tensor | None:
        """int64 [P, K], numbers of the entries that each row of one sequence attends to, -1 where
        there is none; None where each attends to all that it sees."""
        if len(windows.entry_rows_E) <= self._topk:
            return None
        q_PHI = self._rotated_queries(q_rank, rotation_PR2)
        keys_MI = cache.rows(Kind.INDEX_KEYS, self._layer)
        entry_rows_1E = windows.entry_rows_E.unsqueeze(0)
        return self._choose(q_PHI, weights_PH, keys_MI, entry_rows_1E, None, positions_P, None)

    def _rotated_queries(self, q_rank: Rows, rotation_TR2: torch.Tensor) -> torch.Tensor:
        q_THI = self.queries(q_rank).view(-1, self._heads, self._width)
        return self._rotate(q_THI, rotation_TR2)
