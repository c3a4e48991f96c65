"""Lightning indexer: scores the entries of a sequence and chooses those that a row attends to."""

from __future__ import annotations

from typing import TypeAlias

import torch

from metainfer.arch.record import LayerArch
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.linear import linear
from metainfer.nn.rows import Rows
from metainfer.nn.step_index import DecodeWindows, PrefillIndex
from metainfer.ops.index import DENSE, IndexCase, decode_case, shard_case
from metainfer.ops.index_codes import IndexEncodeCase
from metainfer.ops.rope import RotateCase

Coded: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Plain numbers, or codes and scales."""


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
        self._ratio, self._kv = layer.ratio, build.placement.kv
        self.queries = linear(build, f"{prefix}.wq_b")
        widths, key_format = (self._heads, self._width, arch.rope_head_dim), build.caches.key_format
        if key_format == DENSE:
            self._made = build.kernel("rope.rotate", RotateCase(*widths, dtype=build.dtype))
        else:
            encode = IndexEncodeCase(key_format, *widths, dtype=build.dtype)
            self._made = build.kernel("index.encode_queries", encode)
        case = IndexCase(*widths[:2], self._topk, layer.ratio, build.dtype, key_format)
        self._choose = build.kernel("attention.index_topk", case)
        # Entries and index keys lie in the same rows.
        on_shard = shard_case(case) if self._kv.size > 1 else decode_case(case)
        self._choose_decode = build.kernel("attention.index_topk_decode", on_shard)

    def decode(
        self,
        q_rank: Rows,
        weights_TH: torch.Tensor,
        rotation_TR2: torch.Tensor,
        windows: DecodeWindows,
        cache: CacheStorage,
    ) -> torch.Tensor | None:
        """int64 [T, K], rows of the entries that each decode row attends to, -1 where there is
        none; None where no row sees any. Of caches that are divided, those on this shard."""
        entry_rows_TE = windows.entry_rows_TE
        if entry_rows_TE is None or windows.num_entries <= self._topk:
            return entry_rows_TE
        q = self._queries_of(q_rank, rotation_TR2)
        chosen = self._choose_decode(q, weights_TH, self._keys(cache), entry_rows_TE, None)
        if self._kv.size == 1:
            rows_TK: torch.Tensor = chosen
            return rows_TK
        ids_TK, scores_TK = chosen
        is_best_TK = self._kv.best(ids_TK, scores_TK, self._ratio)
        rows_TK = entry_rows_TE.gather(1, ids_TK.clamp(min=0))
        return rows_TK.masked_fill_(~is_best_TK, -1)

    def prefill(
        self,
        q_rank: Rows,
        weights_PH: torch.Tensor,
        rotation_PR2: torch.Tensor,
        part: PrefillIndex,
        cache: CacheStorage,
    ) -> torch.Tensor | None:
        """int64 [P, K], numbers of the entries that each row of one sequence attends to, -1 where
        there is none; None where each attends to all that it sees. All shards call it together."""
        entry_rows_E = part.entry_rows[self._ratio]
        if len(entry_rows_E) <= self._topk:
            return None
        keys = self._keys(cache)
        if part.given_rows:
            keys = self._pooled(keys, part.given_rows[self._ratio])
        if not len(part.positions_P):
            return None
        q = self._queries_of(q_rank, rotation_PR2)
        entry_rows_1E = entry_rows_E.unsqueeze(0)
        return self._choose(q, weights_PH, keys, entry_rows_1E, None, part.positions_P, None)

    def _queries_of(self, q_rank: Rows, rotation_TR2: torch.Tensor) -> Coded:
        q_THI = self.queries(q_rank).view(-1, self._heads, self._width)
        return self._made(q_THI, rotation_TR2)

    def _pooled(self, keys: Coded, given_L: torch.Tensor) -> Coded:
        if isinstance(keys, torch.Tensor):
            return self._kv.pooled(keys, given_L)
        return tuple(self._kv.pooled(part, given_L) for part in keys)

    def _keys(self, cache: CacheStorage) -> Coded:
        codes_or_numbers, *scales = cache.index_keys(self._layer)
        return (codes_or_numbers, *scales) if scales else codes_or_numbers
