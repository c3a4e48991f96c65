"""StepIndex: which cache rows a step reads and writes, computed once and shared by all layers.

Every ring of a kind has the same size in all layers, and so has every growing kind of one ratio;
the row numbers therefore hold for each layer.

Shape suffixes: T rows, B sequences, W window, R ring rows, E entries, S span of an entry, P rows of
a prefill sequence that attend, W in `wanted_rows_W` rows that go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metainfer.nn.share_index import ShareIndex


@dataclass(frozen=True, slots=True)
class DecodeWindows:
    """Compressor windows and entries of the decode rows, at one ratio. Of caches that are divided
    (`kv_shards`), those of this shard.

    Attributes:
        ring_rows_T: compressor ring row of each row.
        closing_TS: ring rows of the tokens of the window that each row closes, -1 before the
            sequence, and everywhere where a row closes none.
        target_rows_T: where the entries of these windows go, -1 where there is none.
        rotation_TR2: at the first token of these windows.
        num_entries: E, entries that the longest sequence sees (at most, of all shards together).
        entry_rows_TE: rows of the entries that each row sees, -1 after the last; one column more
            than E, or than there are on the shard, so that the last is always -1. None where no
            row sees any, on any shard.
    """

    ring_rows_T: torch.Tensor
    closing_TS: torch.Tensor
    target_rows_T: torch.Tensor
    rotation_TR2: torch.Tensor
    num_entries: int
    entry_rows_TE: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """The decode rows of a step, which are its first rows.

    Attributes:
        num_rows: how many.
        ring_rows_T: window ring row of each row.
        window_rows_TW: ring rows that each row sees, itself included; -1 where there is none.
        shard_rows_TV: those that it sees on this shard, where caches are divided; else the same.
        windows: by ratio.
    """

    num_rows: int
    ring_rows_T: torch.Tensor
    window_rows_TW: torch.Tensor
    shard_rows_TV: torch.Tensor
    windows: dict[int, DecodeWindows]


@dataclass(frozen=True, slots=True)
class PrefillWindows:
    """Compressor windows and entries of one prefill sequence, at one ratio.

    Attributes:
        halo_rows: compressor ring rows of the tokens between the first window that is needed and
            the chunk. Those of tokens before the sequence hold anything.
        ring_rows: where the last rows of the chunk go in the compressor ring.
        phase: position % ratio of the first row.
        first_window: number of the first window that is open when the chunk starts.
        num_closed: windows that close in the chunk, from `first_window` on.
        used_rows: rows of [halo | chunk] that these windows (and the one before) take up.
        rotation_ER2: at the first token of each window that closes.
        kept_E: which of their entries this shard keeps; None for all.
        target_rows_E: cache rows where those go.
    """

    halo_rows: torch.Tensor
    ring_rows: torch.Tensor
    phase: int
    first_window: int
    num_closed: int
    used_rows: int
    rotation_ER2: torch.Tensor
    kept_E: torch.Tensor | None
    target_rows_E: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """What the chunk of one prefill sequence reads of rings and writes, where it is one rank's.

    Attributes:
        halo_rows: window ring rows of the positions before `start` that are visible.
        ring_rows_P: window ring row of each row, -1 for those that do not stay.
        ring_rows: those of the last rows, which do.
        windows: by ratio.
    """

    halo_rows: torch.Tensor
    ring_rows_P: torch.Tensor
    ring_rows: torch.Tensor
    windows: dict[int, PrefillWindows]


@dataclass(frozen=True, slots=True)
class PrefillIndex:
    """One prefill sequence of a step.

    Attributes:
        rows: its rows in the step (of those of this rank, where the step is shared).
        attending: those of them that attend: all, but in the last layer.
        queries: the same rows among all rows of the step that attend.
        positions_P: of each row that attends.
        latent_rows_P: place of each row that attends among the latents that its sequence's rows
            see: in [halo | chunk] where the chunk is one rank's.
        entry_rows: by ratio, rows of all entries of the sequence, the new ones included: of the
            cache, or where caches are divided, of the pool of what shards give.
        given_rows: by ratio, cache rows that this shard gives for it; empty where caches are whole.
        chunk: None where the step is shared.
    """

    rows: slice
    attending: slice
    queries: slice
    positions_P: torch.Tensor
    latent_rows_P: torch.Tensor
    entry_rows: dict[int, torch.Tensor]
    given_rows: dict[int, torch.Tensor]
    chunk: ChunkRows | None


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Attributes:
    token_ids_T: int64.
    sliding_TR2, compressing_TR2: fp32 [T, R / 2, 2], rotation of each row in layers without and
        with entries.
    ring_rows_T: int64, where each row's latent goes in the window ring; -1 for those of a chunk
        that later ones overwrite.
    phase_T: by ratio: position % ratio of each decode row.
    decode: None where no sequence decodes.
    prefills: the other sequences.
    wanted_rows_W: int64, rows that attend and go on; None for all. All rows are written to the
        caches in any case.
    padding_T1: bool, which rows are padding; None where none is.
    shares: None where each rank computes all rows; else all above is of this rank's rows alone,
        and how they come together is here.
    """

    token_ids_T: torch.Tensor
    sliding_TR2: torch.Tensor
    compressing_TR2: torch.Tensor
    ring_rows_T: torch.Tensor
    phase_T: dict[int, torch.Tensor]
    decode: DecodeIndex | None
    prefills: tuple[PrefillIndex, ...]
    wanted_rows_W: torch.Tensor | None = None
    padding_T1: torch.Tensor | None = None
    shares: ShareIndex | None = None

    def reads(self, part: PrefillIndex) -> bool:
        """Whether entries of one of the prefills are looked at, on any rank: which rows others have
        is not known where the step is shared."""
        return self.shares is not None or part.attending.start < part.attending.stop

    def wanted(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Of something of all rows that of those which go on."""
        return rows_T if self.wanted_rows_W is None else rows_T.index_select(0, self.wanted_rows_W)
