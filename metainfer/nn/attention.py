"""Attention of the three kinds: over the window alone, with chosen entries, with all entries."""

from __future__ import annotations

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch, LayerKind
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.entries import Entries, States
from metainfer.nn.heads import Heads, HeadWeights
from metainfer.nn.kept_rows import latents
from metainfer.nn.linear import stacked_linear
from metainfer.nn.rows import RmsNorm, Rows
from metainfer.nn.step_index import PrefillIndex, StepIndex
from metainfer.nn.sums import sum_rows


class Attention:
    """Rows of width D -> y_TD in the compute dtype, summed over ranks; H heads of this rank. Where
    the step says which rows are wanted, only they attend, and y has only them.

    One latent per token is key and value of all heads. Decode rows read the ring once they are
    written into it; a prefill chunk is attended to as the cache keeps it, behind the part of the
    ring that it still sees.
    """

    def __init__(self, build: LayerBuilder, layer: LayerArch) -> None:
        prefix = f"layers.{layer.index}.attn"
        self._layer = layer.index
        self._placement = build.placement
        self._slides = layer.kind is LayerKind.SLIDING
        self._entries = None if self._slides else Entries(build, layer)
        self._q_rank_and_latent = stacked_linear(build, (f"{prefix}.wq_a", f"{prefix}.wkv"))
        self._by_heads, self._by_tokens = _sides(build, layer, prefix)
        readers = [self._by_heads.queries]
        if self._entries is not None and self._entries.indexer is not None:
            readers.append(self._entries.indexer.queries)
        self._q_norm = RmsNorm(
            build,
            f"{prefix}.q_norm",
            plain=not all(reader.coded for reader in readers),
            coded=any(reader.coded for reader in readers),
        )
        self._latents = latents(build, layer, f"{prefix}.kv_norm")

    def __call__(self, x: Rows, step: StepIndex, cache: CacheStorage) -> torch.Tensor:
        heads, group = self._by_heads, self._placement.by_heads.heads
        rotation_TR2 = step.sliding_TR2 if self._slides else step.compressing_TR2
        kept_rotation_TR2 = rotation_TR2  # of latents that are kept: those of others among them
        q_rank_TQ, latent_TD = self._q_rank_and_latent(x)
        shares = step.shares
        if shares is not None:
            assert self._by_tokens is not None and self._placement.by_tokens is not None
            heads, group = self._by_tokens, self._placement.by_tokens.heads
            latent_TD = shares.latents.extended(latent_TD)
            kept_rotation_TR2 = shares.sliding_ER2 if self._slides else shares.compressing_ER2
        q_rank_TQ, q_rotation_TR2 = step.wanted(q_rank_TQ), step.wanted(rotation_TR2)
        q_rank = self._q_norm(q_rank_TQ)
        q_THD = heads.queries_of(q_rank, q_rotation_TR2)
        seen = self._latents(latent_TD, kept_rotation_TR2, step, cache)
        states: States = ()
        if self._entries is not None:
            states = self._entries.project(x.plain, shares)
            self._entries.take_in(states, step, cache)

        outputs = []
        if step.decode is not None:
            own = slice(step.decode.num_rows)
            args = q_THD, q_rank, states
            if step.prefills:
                args = q_THD[own], q_rank.part(own), tuple(s[own] for s in states)
            outputs.append(self._decode(heads, *args, step, cache))
        for part, latents_ND in zip(step.prefills, seen, strict=True):
            outputs.append(
                self._prefill(heads, q_THD, latents_ND, q_rank, states, part, step, cache)
            )
        out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return sum_rows(group, heads.outputs(out_THD, q_rotation_TR2), step)

    def _decode(
        self,
        heads: Heads,
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
        ring = cache.rows(Kind.WINDOW, self._layer)
        return heads.attend_decode(q_THD, ring, decode, entries_MD, entry_rows_TK)

    def _prefill(
        self,
        heads: Heads,
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
            entry_rows_E, selected_PK = self._entries.chosen(states, q_rank, part, step, cache)
            entry_rows_1E = entry_rows_E.unsqueeze(0)
            entries_MD = self._entries.read(part, step, cache)
        out_PHD = q_THD[part.queries]
        if len(out_PHD):
            out_PHD = heads.attend_prefill(
                out_PHD,
                part.positions_P,
                latents_ND,
                part.latent_rows_P,
                heads.sink_H,
                entries_MD,
                entry_rows_1E,
                None,
                selected_PK,
            )
        return out_PHD


def _sides(build: LayerBuilder, layer: LayerArch, prefix: str) -> tuple[Heads, Heads | None]:
    """By heads, and by tokens, where there are such steps: then the heads of the first are some of
    those of the second, in the same memory."""
    weights = HeadWeights.read(build, prefix)
    by_tokens = build.placement.by_tokens
    if by_tokens is None:
        return Heads(build, layer, weights), None
    whole = Heads(build, layer, weights, decodes=False)
    with build.again():
        part = weights.part(by_tokens.rows.rank, by_tokens.rows.size)
        return Heads(build, layer, part), whole
