"""Attention of the three kinds: over the window alone, with chosen entries, with all entries."""

from __future__ import annotations

from dataclasses import replace

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch, LayerKind
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.entries import Entries, States
from metainfer.nn.kept_rows import latents
from metainfer.nn.linear import StackedLinear, linear
from metainfer.nn.outputs import AttentionOutputs
from metainfer.nn.rows import RmsNorm, Rows
from metainfer.nn.step_index import PrefillIndex, StepIndex
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.rope import NormRotateCase


class Attention:
    """Rows of width D -> y_TD in the compute dtype, summed over ranks; H heads of this rank. Where
    the step says which rows are wanted, only they attend, and y has only them.

    One latent per token is key and value of all heads. Decode rows read the ring once they are
    written into it; a prefill chunk is attended to as the cache keeps it, behind the part of the
    ring that it still sees.
    """

    def __init__(self, build: LayerBuilder, layer: LayerArch) -> None:
        arch, dtype = build.arch, build.dtype
        prefix = f"layers.{layer.index}.attn"
        self._layer = layer.index
        self._group = build.group
        self._width = arch.head_dim
        self._slides = layer.kind is LayerKind.SLIDING
        self._entries = None if self._slides else Entries(build, layer)

        self._q_rank_and_latent = StackedLinear(build, (f"{prefix}.wq_a", f"{prefix}.wkv"))
        self._queries = linear(build, f"{prefix}.wq_b")
        readers = [self._queries]
        if self._entries is not None and self._entries.indexer is not None:
            readers.append(self._entries.indexer.queries)
        self._q_norm = RmsNorm(
            build,
            f"{prefix}.q_norm",
            plain=not all(reader.coded for reader in readers),
            coded=any(reader.coded for reader in readers),
        )
        self._sink_H = build.tensor(f"{prefix}.attn_sink", torch.float32)
        self._heads = len(self._sink_H)
        self._outputs = AttentionOutputs(build, prefix, self._heads)

        self._latents = latents(build, layer, f"{prefix}.kv_norm")
        widths = (arch.head_dim, arch.rope_head_dim)
        norm_rotate = "rope.norm_rotate"
        eps = arch.rms_norm_eps
        self._norm_rotate_q = build.kernel(
            norm_rotate, NormRotateCase(self._heads, *widths, weighted=False, eps=eps, dtype=dtype)
        )
        topk = arch.index_topk if layer.kind is LayerKind.COMPRESSED_SPARSE else 0
        kept = build.caches.latent_format
        case = AttentionCase(
            self._heads,
            arch.head_dim,
            arch.sliding_window,
            layer.ratio,
            topk,
            dtype,
            entry_format=DENSE if self._slides else kept,
        )
        self._attend_prefill = build.kernel("attention.sparse_prefill", case)
        case = replace(case, window_format=kept)
        self._attend_decode = build.kernel("attention.sparse_decode", case)

    def __call__(self, x: Rows, step: StepIndex, cache: CacheStorage) -> torch.Tensor:
        rotation_TR2 = step.sliding_TR2 if self._slides else step.compressing_TR2
        q_rank_TQ, latent_TD = self._q_rank_and_latent(x)
        q_rank_TQ, q_rotation_TR2 = step.wanted(q_rank_TQ), step.wanted(rotation_TR2)
        q_rank = self._q_norm(q_rank_TQ)
        q_THD = self._queries(q_rank).view(-1, self._heads, self._width)
        q_THD = self._norm_rotate_q(q_THD, None, q_rotation_TR2)
        seen = self._latents(latent_TD, rotation_TR2, step, cache)
        states = self._entries.project(x.plain) if self._entries is not None else ()

        outputs = []
        if step.decode is not None:
            own = slice(step.decode.num_rows)
            args = q_THD, q_rank, states
            if step.prefills:
                args = q_THD[own], q_rank.part(own), tuple(s[own] for s in states)
            outputs.append(self._decode(*args, step, cache))
        for part, latents_ND in zip(step.prefills, seen, strict=True):
            outputs.append(self._prefill(q_THD, latents_ND, q_rank, states, part, step, cache))
        out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._group.all_reduce(self._outputs(out_THD, q_rotation_TR2))

    def _decode(
        self,
        q_THD: torch.Tensor,
        q_rank: Rows,
        states: States,
        step: StepIndex,
        cache: CacheStorage,
    ) -> torch.Tensor:
        """Attention of the decode rows, all sequences at once."""
        decode = step.decode
        assert decode is not None
        entries_MD, entry_rows_TK = None, None
        if self._entries is not None:
            entry_rows_TK = self._entries.decode(states, q_rank, step, cache)
            if entry_rows_TK is not None:
                entries_MD = cache.rows(Kind.ENTRIES, self._layer)
        return self._attend_decode(
            q_THD,
            cache.rows(Kind.WINDOW, self._layer),
            decode.window_rows_TW,
            self._sink_H,
            entries_MD,
            entry_rows_TK,
        )

    def _prefill(
        self,
        q_THD: torch.Tensor,
        latents_ND: torch.Tensor,
        q_rank: Rows,
        states: States,
        part: PrefillIndex,
        step: StepIndex,
        cache: CacheStorage,
    ) -> torch.Tensor:
        """Attention of the chunk of one sequence; latents_ND: those that its rows see."""
        entries_MD, entry_rows_1E, selected_PK = None, None, None
        if self._entries is not None:
            entry_rows_E, selected_PK = self._entries.prefill(states, q_rank, part, step, cache)
            entry_rows_1E = entry_rows_E.unsqueeze(0)
            entries_MD = cache.rows(Kind.ENTRIES, self._layer)
        out_PHD = q_THD[part.queries]
        if len(out_PHD):
            out_PHD = self._attend_prefill(
                out_PHD,
                part.positions_P,
                latents_ND,
                part.latent_rows_P,
                self._sink_H,
                entries_MD,
                entry_rows_1E,
                None,
                selected_PK,
            )
        return out_PHD
