"""Decode over KV shards: rows attend where the entries are.

The queries of all heads go to every shard; what it found goes back to the ranks of the heads, with
its log-sum-exp, and is merged there.

Shape suffixes: S shards, H heads of this rank, J heads of all shards.
"""

from __future__ import annotations

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.ops.attention import AttentionCase, shard_cases


class ShardedDecode:
    """attention.sparse_decode of this rank's heads over the entries of all shards."""

    def __init__(self, build: LayerBuilder, case: AttentionCase, sink_H: torch.Tensor) -> None:
        self._group = build.placement.kv.group
        self._sink_H = sink_H
        alone, merge = shard_cases(case, self._group.size)
        self._attend = build.kernel("attention.sparse_decode", alone)
        self._merge = build.kernel("attention.merge", merge)

    def __call__(
        self,
        q_THD: torch.Tensor,
        ring: torch.Tensor,
        window_rows_TW: torch.Tensor,
        entries: torch.Tensor | None,
        entry_rows_TK: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            window_rows_TW: those that rows see on this shard.
            entry_rows_TK: likewise.
        """
        shards, rows = self._group.size, len(q_THD)
        q_STHD = self._group.all_gather(q_THD).unflatten(0, (shards, rows))
        q_TJD = q_STHD.transpose(0, 1).flatten(1, 2)
        out_TJD, lse_TJ = self._attend(q_TJD, ring, window_rows_TW, None, entries, entry_rows_TK)
        out_STHD, lse_STH = self._sent_back(out_TJD, lse_TJ)
        merged_THD: torch.Tensor = self._merge(out_STHD, lse_STH)[0]
        return merged_THD

    def _sent_back(
        self, out_TJD: torch.Tensor, lse_TJ: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of all heads from this shard -> those of this rank's heads from all shards; the
        sinks are one shard more, whose values are zero. One exchange, of bytes."""
        shards, heads = self._group.size, len(self._sink_H)
        rows, _, width = out_TJD.shape
        out_bytes = rows * heads * width * out_TJD.element_size()
        all_bytes = out_bytes + rows * heads * lse_TJ.element_size()
        sent = out_TJD.new_empty(shards, all_bytes, dtype=torch.uint8)
        for part, own in ((sent[:, :out_bytes], out_TJD), (sent[:, out_bytes:], lse_TJ)):
            to_each = own.unflatten(1, (shards, heads)).transpose(0, 1)
            part.view(own.dtype).view(to_each.shape).copy_(to_each)
        found = self._group.all_to_all(sent)
        out_STHD = out_TJD.new_zeros(shards + 1, rows, heads, width)
        lse_STH = lse_TJ.new_empty(shards + 1, rows, heads)
        for part, taken in ((found[:, :out_bytes], out_STHD), (found[:, out_bytes:], lse_STH)):
            to = taken[:shards]
            to.copy_(part.view(to.dtype).view(to.shape))
        lse_STH[shards].copy_(self._sink_H)
        return out_STHD, lse_STH
