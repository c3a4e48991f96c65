"""StepIndexer: StepInputs -> StepIndex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from metainfer.arch.cache_kinds import BLOCK_TOKENS, spans
from metainfer.nn.builder import LayerBuilder
from metainfer.nn.inputs import DecodeInputs, StepInputs, sent
from metainfer.nn.ring_rows import Chunk, Ring, RingRows, ring_rows
from metainfer.nn.rotary import compressing_table, sliding_table
from metainfer.nn.step_index import (
    ChunkRows,
    DecodeIndex,
    DecodeWindows,
    PrefillIndex,
    PrefillWindows,
    StepIndex,
)
from metainfer.ops.step import StepIndexCase, Windows

_NUMBERS = 6  # results of `step.index_decode` for each ratio


class StepIndexer:
    """Computes the StepIndex of each step; keeps constant tensors only.

    `index` makes lists as short as the step allows; `index_decode` reads nothing on the host.
    """

    def __init__(self, build: LayerBuilder, draft_rows: int) -> None:
        arch, device = build.arch, build.device
        self._device = device
        self.window = arch.sliding_window
        self.window_ring = arch.sliding_window + draft_rows
        # Tokens that one entry mixes, by ratio; the compressor's rings hold as many.
        self.spans = spans(arch)
        self._draft_rows = draft_rows
        self.sliding = sliding_table(arch, device)
        self.compressing = compressing_table(arch, device)
        self._back_W = torch.arange(1 - arch.sliding_window, 1, device=device)
        self._offsets = {
            ratio: torch.arange(BLOCK_TOKENS // ratio, device=device) for ratio in self.spans
        }
        self._back_S = {
            ratio: torch.arange(1 - span, 1, device=device) for ratio, span in self.spans.items()
        }
        self._kv = build.placement.kv
        windows = tuple(Windows(ratio, span) for ratio, span in self.spans.items())
        case = StepIndexCase(
            arch.sliding_window,
            windows,
            arch.rope_head_dim,
            BLOCK_TOKENS,
            shards=self._kv.size,
            shard=self._kv.own,
        )
        self._index_rows = build.kernel("step.index_decode", case)

    def index(self, inputs: StepInputs) -> StepIndex:
        starts = inputs.row_starts
        lengths = [stop - start for start, stop in pairwise(starts)]
        ends = [before + rows for before, rows in zip(inputs.computed, lengths, strict=True)]
        end = max(ends)
        positions_T = inputs.positions_T
        decoding = inputs.num_decode_sequences
        decode = self._decode(inputs, ends[:decoding]) if decoding else None
        prefilling = range(decoding, inputs.num_sequences)
        chunks = [
            Chunk(inputs.slots[n], inputs.computed[n], ends[n], self._rings(inputs.computed[n]))
            for n in prefilling
        ]
        of_rings = ring_rows(chunks, self._device)
        prefills = tuple(
            self._prefill(inputs, sequence, ends[sequence], rows)
            for sequence, rows in zip(prefilling, of_rings, strict=True)
        )
        written = [] if decode is None else [decode.ring_rows_T]
        written += [window.rows_P for window, *_ in of_rings]
        decode_positions_T = positions_T[: inputs.num_decode_rows]
        return StepIndex(
            token_ids_T=inputs.token_ids_T,
            sliding_TR2=self.sliding.rows(positions_T, end),
            compressing_TR2=self.compressing.rows(positions_T, end),
            # Those of decode rows lie apart.
            ring_rows_T=written[0] if decode is None and len(written) == 1 else torch.cat(written),
            phase_T={ratio: decode_positions_T % ratio for ratio in self.spans if decoding},
            decode=decode,
            prefills=prefills,
        )

    @staticmethod
    def last_layer(step: StepIndex, inputs: StepInputs) -> StepIndex:
        """`step` for the last layer, after which nothing is read but the rows that are wanted."""
        if inputs.wanted_counts is None:
            return step
        counts, wanted_rows_W = inputs.wanted_counts, inputs.wanted_rows_W
        if step.shares is not None:
            counts, wanted_rows_W = step.shares.wanted_counts, step.shares.wanted_rows_W
        prefills = []
        place = inputs.num_decode_rows
        for part, count in zip(step.prefills, counts[inputs.num_decode_sequences :], strict=True):
            skipped = part.rows.stop - part.rows.start - count
            prefills.append(
                replace(
                    part,
                    attending=slice(part.rows.stop - count, part.rows.stop),
                    queries=slice(place, place + count),
                    positions_P=part.positions_P[skipped:],
                    latent_rows_P=part.latent_rows_P[skipped:],
                )
            )
            place += count
        return replace(
            step,
            prefills=tuple(prefills),
            wanted_rows_W=wanted_rows_W,
            shares=None if step.shares is None else step.shares.last_layer(),
        )

    def _decode(self, inputs: StepInputs, ends: list[int]) -> DecodeIndex:
        """The rows of the decoding sequences, which go up to the positions `ends`."""
        rows = inputs.num_decode_rows
        positions_T1 = inputs.positions_T[:rows].unsqueeze(1)
        sequence_T = inputs.sequence_T[:rows]
        slots_T1 = inputs.state_slots_B.index_select(0, sequence_T).unsqueeze(1)
        window_rows_TW = _ring_rows(slots_T1, positions_T1 + self._back_W, self.window_ring)
        return DecodeIndex(
            num_rows=rows,
            ring_rows_T=window_rows_TW[:, -1],
            window_rows_TW=window_rows_TW,
            shard_rows_TV=self._kv.window(window_rows_TW),
            windows={
                ratio: self._decode_windows(inputs, ratio, positions_T1, slots_T1, ends)
                for ratio in self.spans
            },
        )

    def _decode_windows(
        self,
        inputs: StepInputs,
        ratio: int,
        positions_T1: torch.Tensor,
        slots_T1: torch.Tensor,
        ends: list[int],
    ) -> DecodeWindows:
        ring = self.ring(ratio)
        num_entries = max(ends) // ratio
        seen_T1 = (positions_T1 + 1) // ratio
        is_open_T1 = seen_T1 * ratio != positions_T1 + 1
        closing_TS = _ring_rows(slots_T1, positions_T1 + self._back_S[ratio], ring)
        window_T1 = positions_T1 // ratio
        shard_T1, place_T1 = self._kv.place(window_T1, ratio)
        is_open_T1 |= shard_T1 != self._kv.own
        target_T1 = torch.full_like(window_T1, -1)
        entry_rows_TE = None
        if num_entries:
            tables_TM = inputs.block_table_BM.index_select(
                0, inputs.sequence_T[: len(positions_T1)]
            )
            held = self._kv.held(num_entries, ratio)
            entry_rows_TE = self._entry_rows(tables_TM, ratio, held)
            # Windows behind the last entry are open.
            target_T1 = entry_rows_TE.gather(1, place_T1.clamp(max=held))
            entry_E = torch.arange(held + 1, device=self._device)
            own_T1 = self._kv.held_of(seen_T1, ratio)
            entry_rows_TE = entry_rows_TE.masked_fill_(entry_E >= own_T1, -1)
        return DecodeWindows(
            ring_rows_T=(slots_T1 * ring + positions_T1 % ring).squeeze(1),
            closing_TS=closing_TS.masked_fill_(is_open_T1, -1),
            target_rows_T=target_T1.masked_fill_(is_open_T1, -1).squeeze(1),
            rotation_TR2=self.compressing.rows((window_T1 * ratio).squeeze(1), max(ends)),
            num_entries=num_entries,
            entry_rows_TE=entry_rows_TE,
        )

    def index_decode(self, inputs: DecodeInputs) -> StepIndex:
        """The index of decode rows in shapes that depend on those of `inputs` alone."""
        sliding_TR2, compressing_TR2, ring_rows_T, window_rows_TW, *of_ratios = self._index_rows(
            inputs.positions_T,
            inputs.slots_T,
            inputs.tables_NM,
            self._draft_rows,
            self.sliding.parts,
            self.compressing.parts,
        )
        phase_T: dict[int, torch.Tensor] = {}
        windows: dict[int, DecodeWindows] = {}
        for place, ratio in enumerate(self.spans):
            phase_T[ratio], rows_T, closing_TS, target_T, rotation_TR2, entry_rows_TE = of_ratios[
                place * _NUMBERS : (place + 1) * _NUMBERS
            ]
            windows[ratio] = DecodeWindows(
                ring_rows_T=rows_T,
                closing_TS=closing_TS,
                target_rows_T=target_T,
                rotation_TR2=rotation_TR2,
                num_entries=(entry_rows_TE.shape[1] - 1) * self._kv.size,
                entry_rows_TE=entry_rows_TE,
            )
        return StepIndex(
            token_ids_T=inputs.token_ids_T,
            sliding_TR2=sliding_TR2,
            compressing_TR2=compressing_TR2,
            ring_rows_T=ring_rows_T,
            phase_T=phase_T,
            decode=DecodeIndex(
                len(ring_rows_T),
                ring_rows_T,
                window_rows_TW,
                self._kv.window(window_rows_TW),
                windows,
            ),
            prefills=(),
            padding_T1=inputs.positions_T.unsqueeze(1) < 0 if inputs.may_pad else None,
        )

    def _rings(self, start: int) -> list[Ring]:
        """Of a chunk from `start` on: that of the window, and by ratio those of compressors."""
        return [
            Ring(self.window_ring, self._halo_start(start)),
            *(
                Ring(self.ring(ratio), start // ratio * ratio - (span - ratio))
                for ratio, span in self.spans.items()
            ),
        ]

    def _halo_start(self, start: int) -> int:
        """The first position that the row at `start` sees."""
        return max(0, start - self.window + 1)

    def _prefill(
        self, inputs: StepInputs, sequence: int, end: int, of_rings: list[RingRows]
    ) -> PrefillIndex:
        """`of_rings`: as `_rings` lists them."""
        rows = slice(inputs.row_starts[sequence], inputs.row_starts[sequence + 1])
        window, *others = of_rings
        start = inputs.computed[sequence]
        halo_start = self._halo_start(start)
        positions_P = inputs.positions_T[rows]
        own_rows, entry_rows, given_rows = self.entry_rows(inputs, sequence, end)
        return PrefillIndex(
            rows=rows,
            attending=rows,
            queries=rows,
            positions_P=positions_P,
            latent_rows_P=positions_P - halo_start if halo_start else positions_P,
            entry_rows=entry_rows,
            given_rows=given_rows,
            chunk=ChunkRows(
                halo_rows=window.halo,
                ring_rows_P=window.rows_P,
                ring_rows=window.kept,
                windows={
                    ratio: self._prefill_windows(start, ratio, end, rows, own_rows[ratio])
                    for ratio, rows in zip(self.spans, others, strict=True)
                },
            ),
        )

    def _prefill_windows(
        self, start: int, ratio: int, end: int, rows: RingRows, own_rows_E: torch.Tensor
    ) -> PrefillWindows:
        first_window = start // ratio
        num_closed = end // ratio - first_window
        first_tokens_E = torch.arange(
            first_window * ratio, end // ratio * ratio, ratio, device=self._device
        )
        return PrefillWindows(
            halo_rows=rows.halo,
            ring_rows=rows.kept,
            phase=start % ratio,
            first_window=first_window,
            num_closed=num_closed,
            used_rows=num_closed * ratio + self.spans[ratio] - ratio,
            rotation_ER2=self.compressing.rows(first_tokens_E, end),
            kept_E=self.kept([(first_window, end // ratio)], ratio),
            target_rows_E=self.kept_rows(own_rows_E, first_window, ratio),
        )

    def ring(self, ratio: int) -> int:
        """Rows of a slot of the compressors' rings."""
        return self.spans[ratio] + self._draft_rows

    def entry_rows(
        self, inputs: StepInputs, sequence: int, end: int
    ) -> tuple[dict[int, torch.Tensor], ...]:
        """Of the entries of a sequence up to the position `end`, by ratio: cache rows of those of
        this shard; then `entry_rows` and `given_rows` of PrefillIndex."""
        table_1M = inputs.block_table_BM[sequence : sequence + 1]
        if self._kv.size == 1:
            rows = {
                ratio: self._entry_rows(table_1M, ratio, end // ratio)[0, :-1]
                for ratio in self.spans
            }
            return rows, rows, {}
        own_rows, pool_rows, given_rows = {}, {}, {}
        for ratio in self.spans:
            count = end // ratio
            given = self._kv.given(count, ratio)
            given_L = self._entry_rows(table_1M, ratio, given)[0, :-1]
            shard_E, place_E = self._kv.place(torch.arange(count, device=self._device), ratio)
            own_rows[ratio] = given_L[: self._kv.held(count, ratio)]
            pool_rows[ratio] = shard_E * given + place_E
            given_rows[ratio] = given_L
        return own_rows, pool_rows, given_rows

    def kept(self, windows: Sequence[tuple[int, int]], ratio: int) -> torch.Tensor | None:
        """Of the entries of windows, one (first, stop) of each sequence, those that this shard
        keeps, as places among them all; None for all."""
        if self._kv.size == 1:
            return None
        begins = accumulate((stop - first for first, stop in windows), initial=0)
        kept = [
            begin + self._kv.kept(first, stop, ratio)
            for begin, (first, stop) in zip(begins, windows, strict=False)
        ]
        return sent(np.concatenate(kept), self._device)

    def kept_rows(self, own_rows_E: torch.Tensor, first_window: int, ratio: int) -> torch.Tensor:
        """Of the cache rows of a sequence on this shard, those of its windows from a first on."""
        return own_rows_E[self._kv.held(first_window, ratio) :]

    def _entry_rows(self, table_BM: torch.Tensor, ratio: int, num_entries: int) -> torch.Tensor:
        """Cache rows of the entries 0 .. E - 1 of each block table, then a column of -1."""
        per_block = BLOCK_TOKENS // ratio
        blocks = -(-num_entries // per_block)
        rows_BMO = (table_BM[:, :blocks] * per_block).unsqueeze(2) + self._offsets[ratio]
        rows_BE = rows_BMO.flatten(1)[:, :num_entries]
        return torch.nn.functional.pad(rows_BE, (0, 1), value=-1)


def _ring_rows(slots_T1: torch.Tensor, positions_TW: torch.Tensor, ring: int) -> torch.Tensor:
    """Ring rows of the positions, -1 for negative ones."""
    rows_TW = slots_T1 * ring + positions_TW % ring
    return rows_TW.masked_fill_(positions_TW < 0, -1)
