"""Rows on their way into the caches of a layer, in the formats of the plan.

Every step reads rows as the cache keeps them, so that chunks change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.step_index import StepIndex
from metainfer.ops.cache import DENSE, CacheReadCase, CacheWriteCase
from metainfer.ops.index_codes import IndexWriteCase
from metainfer.ops.rope import NormRotateCase

Latents: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, StepIndex, CacheStorage], list[torch.Tensor]
]
"""(latent_TD, rotation_TR2, step, cache): norms and rotates the latents of all rows (where the step
is shared, of the extended ones) and writes them into the rings; returns for each prefill of the
step what its rows see, [visible before | chunk]."""

Writer: TypeAlias = Callable[[torch.Tensor, torch.Tensor, CacheStorage], None]
"""(x_ED, rows_E, cache): writes rows of a growing kind."""


def latents(build: LayerBuilder, layer: LayerArch, prefix: str) -> Latents:
    """Those of the window of `layer`; `prefix` names their norm."""
    if build.caches.latent_format == DENSE:
        return DenseLatents(build, layer, prefix)
    return CodedLatents(build, layer, prefix)


class DenseLatents:
    """Into rings of plain numbers."""

    def __init__(self, build: LayerBuilder, layer: LayerArch, prefix: str) -> None:
        arch = build.arch
        self._layer = layer.index
        self._dtype = build.compute_dtype
        self._weight_D = build.norm_weight(prefix)
        case = NormRotateCase(
            1,
            arch.head_dim,
            arch.rope_head_dim,
            weighted=True,
            eps=arch.rms_norm_eps,
            dtype=build.dtype,
        )
        self._norm_rotate = build.kernel("rope.norm_rotate", case)
        # Where launches count, a decode step norms, rotates and writes in one.
        self._write = None
        if build.rounding is not None:
            widths = arch.head_dim, arch.rope_head_dim
            write = CacheWriteCase(DENSE, *widths, "rms", eps=arch.rms_norm_eps, dtype=build.dtype)
            self._write = build.kernel("cache.write", write)

    def __call__(
        self,
        latent_TD: torch.Tensor,
        rotation_TR2: torch.Tensor,
        step: StepIndex,
        cache: CacheStorage,
    ) -> list[torch.Tensor]:
        ring_ND = cache.rows(Kind.WINDOW, self._layer)
        if self._write is not None and not step.prefills and step.shares is None:
            assert step.decode is not None
            rows_T = step.decode.ring_rows_T
            self._write(latent_TD, self._weight_D, rotation_TR2, ring_ND, rows_T)
            return []
        latent_T1D = self._norm_rotate(latent_TD.unsqueeze(1), self._weight_D, rotation_TR2)
        latent_TD = latent_T1D.squeeze(1).to(ring_ND.dtype)
        if step.shares is not None:
            rows = step.shares.latents
            source_ND = torch.cat([ring_ND.index_select(0, rows.halo_rows_H), latent_TD])
            ring_ND.index_copy_(0, rows.ring_rows_K, latent_TD.index_select(0, rows.kept_K))
            return rows.of_readers(source_ND.to(self._dtype))
        if step.decode is not None:
            own_TD = latent_TD[: step.decode.num_rows] if step.prefills else latent_TD
            ring_ND.index_copy_(0, step.decode.ring_rows_T, own_TD)
        seen = []
        for part in step.prefills:
            assert part.chunk is not None
            halo_rows, ring_rows = part.chunk.halo_rows, part.chunk.ring_rows
            chunk_PD = seen_ND = latent_TD[part.rows].contiguous()
            if len(halo_rows):
                seen_ND = torch.cat([ring_ND.index_select(0, halo_rows), chunk_PD])
            seen.append(seen_ND.to(self._dtype))
            ring_ND.index_copy_(0, ring_rows, chunk_PD[-len(ring_rows) :])
        return seen


class CodedLatents:
    """Into rings of bytes."""

    def __init__(self, build: LayerBuilder, layer: LayerArch, prefix: str) -> None:
        arch, kept = build.arch, build.caches.latent_format
        self._layer = layer.index
        self._weight_D = build.norm_weight(prefix)
        write = CacheWriteCase(
            kept,
            arch.head_dim,
            arch.rope_head_dim,
            "rms",
            eps=arch.rms_norm_eps,
            dtype=build.dtype,
        )
        self._write = build.kernel("cache.write", write)
        self._read = build.kernel("cache.read", CacheReadCase(kept, build.dtype))

    def __call__(
        self,
        latent_TD: torch.Tensor,
        rotation_TR2: torch.Tensor,
        step: StepIndex,
        cache: CacheStorage,
    ) -> list[torch.Tensor]:
        ring = cache.rows(Kind.WINDOW, self._layer)
        # The end of a chunk overwrites what lies before it.
        if step.shares is not None:
            rows = step.shares.latents
            halo_HD = self._read(ring, rows.halo_rows_H)
            args = self._weight_D, rotation_TR2, ring, step.shares.ring_rows_E
            return rows.of_readers(torch.cat([halo_HD, self._write(latent_TD, *args)]))
        halo_rows = [part.chunk.halo_rows for part in step.prefills if part.chunk is not None]
        halos = [[self._read(ring, rows)] if len(rows) else [] for rows in halo_rows]
        latent_TD = self._write(latent_TD, self._weight_D, rotation_TR2, ring, step.ring_rows_T)
        return [
            torch.cat([*halo, latent_TD[part.rows]]) if halo else latent_TD[part.rows]
            for halo, part in zip(halos, step.prefills, strict=True)
        ]


def is_plain(build: LayerBuilder, kind: Kind) -> bool:
    """Whether rows of a growing kind are kept as plain numbers."""
    caches = build.caches
    return (caches.key_format if kind is Kind.INDEX_KEYS else caches.latent_format) == DENSE


def writer(build: LayerBuilder, layer: LayerArch, kind: Kind) -> Writer:
    """Of rows of `kind` that `layer` owns: entries, or index keys."""
    number = layer.index
    if kind is Kind.INDEX_KEYS and not is_plain(build, kind):
        width = build.arch.index_head_dim
        keys = IndexWriteCase(build.caches.key_format, width, dtype=build.dtype)
        encode = build.kernel("cache.write_index", keys)

        def write_keys(x_EI: torch.Tensor, rows_E: torch.Tensor, cache: CacheStorage) -> None:
            encode(x_EI, None, None, None, *cache.index_keys(number), rows_E)

        return write_keys
    if kind is Kind.ENTRIES and not is_plain(build, kind):
        entries = CacheWriteCase(build.caches.latent_format, build.arch.head_dim, dtype=build.dtype)
        write = build.kernel("cache.write", entries)

        def write_entries(x_ED: torch.Tensor, rows_E: torch.Tensor, cache: CacheStorage) -> None:
            write(x_ED, None, None, cache.rows(kind, number), rows_E)

        return write_entries

    def copy(x_ED: torch.Tensor, rows_E: torch.Tensor, cache: CacheStorage) -> None:
        rows_MD = cache.rows(kind, number)
        rows_MD.index_copy_(0, rows_E, x_ED.to(rows_MD.dtype))

    return copy
