"""Compressor: pools windows of tokens into entries, across chunks and steps."""

from __future__ import annotations

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch, LayerKind
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.kept_rows import is_plain, writer
from metainfer.nn.share_index import SharedWindows
from metainfer.nn.step_index import DecodeWindows, PrefillWindows
from metainfer.ops.compress import CompressCase


class Compressor:
    """One compressor of one layer: of the latents, or of the index keys.

    A token's row of state is fp32 [value | score]; what depends on its place in its window is added
    to the score here, before it goes into the ring.

    Attributes:
        names: the matrices that give value and score, for a product that layers share.
        width: numbers of state per token.
    """

    def __init__(
        self, build: LayerBuilder, layer: LayerArch, prefix: str, ring: Kind, entries: Kind
    ) -> None:
        arch = build.arch
        self._layer = layer.index
        self._ring, self._entries = ring, entries
        self.names = (f"{prefix}.wkv.weight", f"{prefix}.wgate.weight")
        self._norm_weight_D = build.norm_weight(f"{prefix}.norm")
        case = CompressCase(
            layer.ratio,
            len(self._norm_weight_D),
            arch.rope_head_dim,
            layer.kind is LayerKind.COMPRESSED_SPARSE,
            arch.rms_norm_eps,
            build.dtype,
        )
        self.width = case.row_width
        score_bias = build.checkpoint.tensor(f"{prefix}.ape", torch.float32)
        bias_RW = torch.cat([torch.zeros_like(score_bias), score_bias], dim=1)
        self._bias_RW = bias_RW.to(build.device)
        self._dtype = build.compute_dtype
        self._compress = build.kernel("attention.compress", case)
        self._is_plain = is_plain(build, entries)
        self._write = writer(build, layer, entries)
        self._step = build.kernel("attention.compress_step", case)

    def decode(
        self,
        state_TW: torch.Tensor,
        phase_T: torch.Tensor,
        windows: DecodeWindows,
        cache: CacheStorage,
    ) -> None:
        """Take in one row of state for each decode row, and write the entries that are complete."""
        plain = cache.rows(self._entries, self._layer) if self._is_plain else None
        entries_TD = self._step(
            state_TW,
            self._bias_RW,
            phase_T,
            cache.rows(self._ring, self._layer),
            windows.ring_rows_T,
            windows.closing_TS,
            self._norm_weight_D,
            windows.rotation_TR2,
            plain,
            windows.target_rows_T,
        )
        if plain is None:
            self._write(entries_TD, windows.target_rows_T, cache)

    def prefill(
        self,
        state_PW: torch.Tensor,
        windows: PrefillWindows,
        cache: CacheStorage,
    ) -> None:
        """Take in the chunk of one sequence, whose state is overwritten, and write the entries that
        are complete."""
        self._add_bias(state_PW, windows.phase)
        ring_NW = cache.rows(self._ring, self._layer)
        if windows.num_closed:
            halo = ring_NW.index_select(0, windows.halo_rows)
            rows_NW = torch.cat([halo, state_PW])[: windows.used_rows]
            entries_ED = self._compress(
                rows_NW, windows.first_window, self._norm_weight_D, windows.rotation_ER2
            )
            self._write(_kept(entries_ED, windows.kept_E), windows.target_rows_E, cache)
        ring_NW.index_copy_(0, windows.ring_rows, state_PW[-len(windows.ring_rows) :])

    def prefill_shared(
        self, state_EW: torch.Tensor, windows: SharedWindows, cache: CacheStorage
    ) -> None:
        """Take in the chunks of a step that ranks share; `state_EW`, the extended rows of state,
        is overwritten. All ranks write the entries of all, or those that their shards keep."""
        state_EW += self._bias_RW.index_select(0, windows.phase_E)
        ring_NW = cache.rows(self._ring, self._layer)
        rows = windows.rows
        source_NW = torch.cat([ring_NW.index_select(0, rows.halo_rows_H), state_EW])
        entries = [
            self._compress(source_NW.index_select(0, seen_N), first, self._norm_weight_D, rotation)
            for seen_N, first, rotation in zip(
                rows.seen, windows.first_windows, windows.rotations, strict=True
            )
        ]
        if windows.most:
            own_ED = (
                torch.cat(entries)
                if entries
                else source_NW.new_empty(0, len(self._norm_weight_D), dtype=self._dtype)
            )
            entries_ED = _kept(windows.gathered(own_ED), windows.kept_E)
            self._write(entries_ED, windows.target_rows_E, cache)
        ring_NW.index_copy_(0, rows.ring_rows_K, state_EW.index_select(0, rows.kept_K))

    def _add_bias(self, state_PW: torch.Tensor, phase: int) -> None:
        """To rows that follow each other, the first at a place in its window: whole windows at
        once, and what lies before and behind them."""
        rows, ratio = len(state_PW), len(self._bias_RW)
        before = min(-phase % ratio, rows)
        behind = (rows - before) % ratio
        if before:
            state_PW[:before] += self._bias_RW[phase : phase + before]
        if before + behind < rows:
            whole_PW = state_PW[before : rows - behind]
            whole_PW.unflatten(0, (-1, ratio)).add_(self._bias_RW)
        if behind:
            state_PW[rows - behind :] += self._bias_RW[:behind]


def _kept(entries_ED: torch.Tensor, kept_E: torch.Tensor | None) -> torch.Tensor:
    return entries_ED if kept_E is None else entries_ED.index_select(0, kept_E)
