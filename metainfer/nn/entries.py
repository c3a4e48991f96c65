"""Entries: the compressed past of a layer, pooled by compressors and chosen by the indexer."""

from __future__ import annotations

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch, LayerKind
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.compressor import Compressor
from metainfer.nn.indexer import Indexer
from metainfer.nn.linear import dense_fp32
from metainfer.nn.rows import Rows
from metainfer.nn.share_index import ShareIndex
from metainfer.nn.step_index import PrefillIndex, StepIndex

States = tuple[torch.Tensor, ...]  # of the compressors, then (CSA) the head weights of the indexer


class Entries:
    """All that one layer does about entries: CSA (with indexer) and HCA (without).

    The rows of state of both compressors and the indexer's head weights come from one product in
    fp32, whose columns they share.

    Attributes:
        indexer: of CSA alone.
    """

    def __init__(self, build: LayerBuilder, layer: LayerArch) -> None:
        prefix = f"layers.{layer.index}.attn"
        self._layer, self._ratio = layer.index, layer.ratio
        self._kv = build.placement.kv
        main = Compressor(build, layer, f"{prefix}.compressor", Kind.COMPRESSOR, Kind.ENTRIES)
        self._compressors = [main]
        self.indexer: Indexer | None = None
        names = list(main.names)
        sizes = [main.width]
        if layer.kind is LayerKind.COMPRESSED_SPARSE:
            keys = Compressor(
                build,
                layer,
                f"{prefix}.indexer.compressor",
                Kind.INDEX_COMPRESSOR,
                Kind.INDEX_KEYS,
            )
            self._compressors.append(keys)
            self.indexer = Indexer(build, layer, f"{prefix}.indexer")
            names += [*keys.names, f"{prefix}.indexer.weights_proj.weight"]
            sizes += [keys.width, build.arch.index_num_heads]
        self._sizes = sizes
        self._project = dense_fp32(build, names)

    def project(self, x_TD: torch.Tensor, shares: ShareIndex | None) -> States:
        """fp32 states of all rows of the step, or of the extended ones where it is shared; their
        rows lie apart."""
        states_TW = self._project(x_TD)
        if shares is not None:
            states_TW = shares.windows[self._ratio].rows.extended(states_TW)
        return states_TW.split(self._sizes, dim=1)

    def decode(
        self, states: States, q_rank: Rows, step: StepIndex, cache: CacheStorage
    ) -> torch.Tensor | None:
        """Take in the decode rows, and no others; returns the rows of Kind.ENTRIES that each
        attends to, or None where there are none (as `attention.sparse_decode` wants them)."""
        assert step.decode is not None
        windows = step.decode.windows[self._ratio]
        phase_T = step.phase_T[self._ratio]
        for compressor, state_TW in zip(self._compressors, states, strict=False):
            compressor.decode(state_TW, phase_T, windows, cache)
        if self.indexer is None:
            return windows.entry_rows_TE
        rotation_TR2 = step.compressing_TR2[: step.decode.num_rows]
        return self.indexer.decode(q_rank, states[-1], rotation_TR2, windows, cache)

    def take_in(self, states: States, step: StepIndex, cache: CacheStorage) -> None:
        """Take in the chunks of all sequences that prefill, and write the entries that they
        complete."""
        for compressor, state_TW in zip(self._compressors, states, strict=False):
            if step.shares is not None:
                compressor.prefill_shared(state_TW, step.shares.windows[self._ratio], cache)
                continue
            for part in step.prefills:
                assert part.chunk is not None
                compressor.prefill(state_TW[part.rows], part.chunk.windows[self._ratio], cache)

    def chosen(
        self,
        states: States,
        q_rank: Rows,
        part: PrefillIndex,
        step: StepIndex,
        cache: CacheStorage,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of `read` of one sequence, whose chunk was taken in, and what of them each row that
        attends attends to (as `attention.sparse_prefill` wants them)."""
        entry_rows_E = part.entry_rows[self._ratio]
        if self.indexer is None or not step.reads(part):
            return entry_rows_E, None
        selected_PK = self.indexer.prefill(
            q_rank.part(part.queries),
            states[-1][part.attending],
            step.compressing_TR2[part.attending],
            part,
            cache,
        )
        return entry_rows_E, selected_PK

    def read(self, part: PrefillIndex, step: StepIndex, cache: CacheStorage) -> torch.Tensor:
        """Entries that one sequence attends to: those of the cache, or where caches are divided, a
        pool of what all shards have of it."""
        entries_MD = cache.rows(Kind.ENTRIES, self._layer)
        if not part.given_rows or not step.reads(part):
            return entries_MD
        return self._kv.pooled(entries_MD, part.given_rows[self._ratio])
