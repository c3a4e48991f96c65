"""Compressor: pools windows of tokens into entries, across chunks and steps."""

from __future__ import annotations

import torch

from metainfer.arch.cache_kinds import Kind
from metainfer.arch.record import LayerArch, LayerKind
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.cache import CacheStorage
from metainfer.nn.kept_rows import writer
from metainfer.nn.step_index import DecodeWindows, PrefillWindows
from metainfer.ops.compress import CompressCase


class Compressor:
    """One compressor of one layer: of the latents, or of the index keys.

    A token's row of state is fp32 [value | score], the position bias already in the score.

    Attributes:
        names: the matrices that give value and score, for a product that layers share.
        width: numbers of state per token.
        bias_RW: what is added to the rows of state, by position % ratio: 0 for values.
    """

    def __init__(
        self, build: LayerBuilder, layer: LayerArch, prefix: str, ring: Kind, entries: Kind
    ) -> None:
        arch = build.arch
        self._layer = layer.index
        self._ring = ring
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
        self.bias_RW = torch.cat([torch.zeros_like(score_bias), score_bias], dim=1)
        self._compress = build.kernel("attention.compress", case)
        self._write = writer(build, layer, entries)
        self._compress_decode = build.kernel("attention.compress_decode", case)

    def decode(self, state_TW: torch.Tensor, windows: DecodeWindows, cache: CacheStorage) -> None:
        """Take in one row of state for each decode row, and write the entries that are complete."""
        ring_NW = cache.rows(self._ring, self._layer)
        ring_NW.index_copy_(0, windows.ring_rows_T, state_TW)
        if windows.closing_CS is None or windows.target_rows_C is None:
            return
        entries_CD = self._compress_decode(
            ring_NW, windows.closing_CS, self._norm_weight_D, windows.rotation_CR2
        )
        self._write(entries_CD, windows.target_rows_C, cache)

    def prefill(self, state_PW: torch.Tensor, windows: PrefillWindows, cache: CacheStorage) -> None:
        """Take in the chunk of one sequence, and write the entries that are complete."""
        ring_NW = cache.rows(self._ring, self._layer)
        if windows.num_closed:
            halo = ring_NW.index_select(0, windows.halo_rows)
            rows_NW = torch.cat([halo, state_PW])[: windows.used_rows]
            entries_ED = self._compress(
                rows_NW, windows.first_window, self._norm_weight_D, windows.rotation_ER2
            )
            self._write(entries_ED, windows.entry_rows_E[windows.first_window :], cache)
        ring_NW.index_copy_(0, windows.ring_rows, state_PW[-len(windows.ring_rows) :])
