"""Heads: attention of the heads that a rank has, in steps of one kind of placement."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from metainfer.arch.record import LayerArch, LayerKind
from metainfer.arch.split import COLUMNS, ROWS, rank_share
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.linear import Linear
from metainfer.nn.outputs import AttentionOutputs
from metainfer.nn.rows import Rows
from metainfer.nn.sharded_decode import ShardedDecode
from metainfer.nn.step_index import DecodeIndex
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.rope import NormRotateCase
from metainfer.weights.formats import Weight, part_of


class HeadWeights(NamedTuple):
    """All of a layer that is divided by heads: what a rank keeps of it, on the device."""

    queries: Weight
    sink_H: torch.Tensor
    first: Weight
    second: Weight

    @classmethod
    def read(cls, build: LayerBuilder, prefix: str) -> HeadWeights:
        queries, first, second = (
            build.checkpoint.weight(f"{prefix}.{name}").to(build.device)
            for name in ("wq_b", "wo_a", "wo_b")
        )
        return cls(queries, build.tensor(f"{prefix}.attn_sink", torch.float32), first, second)

    def part(self, rank: int, size: int) -> HeadWeights:
        """Of so many parts one, in the same memory."""
        sink = rank_share(len(self.sink_H), rank, size)
        return HeadWeights(
            part_of(self.queries, ROWS, rank, size),
            self.sink_H.narrow(0, *sink),
            part_of(self.first, ROWS, rank, size),
            part_of(self.second, COLUMNS, rank, size),
        )


class Heads:
    """Low-rank queries -> queries_THD, which attend; what they give -> y_TD of these heads alone.

    Attributes:
        queries: the product that makes them.
        attend_prefill: the op, bound.
        sharded: how they decode where the entries of the layer are divided; else None.
        sink_H: fp32.
    """

    def __init__(
        self, build: LayerBuilder, layer: LayerArch, weights: HeadWeights, *, decodes: bool = True
    ) -> None:
        """`decodes`: whether steps that decode use them."""
        arch = build.arch
        self.sink_H = weights.sink_H
        heads = len(self.sink_H)
        self._shape = heads, arch.head_dim
        self.queries = Linear(build, weights.queries)
        widths = heads, arch.head_dim, arch.rope_head_dim
        rotate = NormRotateCase(*widths, weighted=False, eps=arch.rms_norm_eps, dtype=build.dtype)
        self._norm_rotate = build.kernel("rope.norm_rotate", rotate)
        kept = build.caches.latent_format
        case = AttentionCase(
            *self._shape,
            arch.sliding_window,
            layer.ratio,
            arch.index_topk if layer.kind is LayerKind.COMPRESSED_SPARSE else 0,
            build.dtype,
            entry_format=DENSE if layer.kind is LayerKind.SLIDING else kept,
        )
        self.attend_prefill = build.kernel("attention.sparse_prefill", case)
        case = replace(case, window_format=kept)
        self.sharded: ShardedDecode | None = None
        divided = layer.kind is not LayerKind.SLIDING and build.placement.kv.size > 1
        if decodes and divided:
            self.sharded = ShardedDecode(build, case, self.sink_H)
        elif decodes:
            self._attend_decode = build.kernel("attention.sparse_decode", case)
        self.outputs = AttentionOutputs(build, weights.first, weights.second, heads)

    def attend_decode(
        self,
        q_THD: torch.Tensor,
        ring: torch.Tensor,
        decode: DecodeIndex,
        entries: torch.Tensor | None,
        entry_rows_TK: torch.Tensor | None,
    ) -> torch.Tensor:
        """`entry_rows_TK`: of this shard, where entries are divided."""
        if self.sharded is not None:
            return self.sharded(q_THD, ring, decode.shard_rows_TV, entries, entry_rows_TK)
        rows_THD: torch.Tensor = self._attend_decode(
            q_THD, ring, decode.window_rows_TW, self.sink_H, entries, entry_rows_TK
        )
        return rows_THD

    def queries_of(self, q_rank: Rows, rotation_TR2: torch.Tensor) -> torch.Tensor:
        """q_THD, normed and rotated."""
        q_THD = self.queries(q_rank).view(-1, *self._shape)
        rotated_THD: torch.Tensor = self._norm_rotate(q_THD, None, rotation_TR2)
        return rotated_THD
