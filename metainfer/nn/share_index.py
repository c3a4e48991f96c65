"""ShareIndex: a prefill step that is sharded over tokens, as the layers of one rank see it.

See `token_shares` for what is own, taken and extended, and for shape suffixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from metainfer.comm.group import Group
from metainfer.plan.routes import PREFILL


@dataclass(frozen=True, slots=True)
class ExtendedRows:
    """Rows of one kind of state, where they come from and where they go.

    Attributes:
        group: over which rows are dealt.
        given_G: own rows that this rank lays down for others; none where no rank takes any.
        taken_X: of what all laid down, the rows that stand behind the own ones.
        halo_rows_H: ring rows that are read before the rings are written.
        kept_K, ring_rows_K: extended rows that go into the rings, and where.
        seen: rows of [ring rows | extended rows], for each reader.
    """

    group: Group
    given_G: torch.Tensor
    taken_X: torch.Tensor
    halo_rows_H: torch.Tensor
    kept_K: torch.Tensor
    ring_rows_K: torch.Tensor
    seen: tuple[torch.Tensor, ...]

    def extended(self, own_TW: torch.Tensor) -> torch.Tensor:
        """[E, W]. All ranks call it together."""
        if not len(self.given_G):
            return own_TW
        pool = self.group.all_gather(own_TW.index_select(0, self.given_G), PREFILL)
        return torch.cat([own_TW, pool.index_select(0, self.taken_X)])

    def of_readers(self, source_NW: torch.Tensor) -> list[torch.Tensor]:
        """What each reader sees of [ring rows | extended rows]."""
        return [source_NW.index_select(0, rows) for rows in self.seen]


@dataclass(frozen=True, slots=True)
class SharedWindows:
    """Compressor windows of one ratio.

    Attributes:
        rows: of states; readers are this rank's runs that close windows.
        phase_E: position % ratio of the extended rows.
        first_windows: of each reader.
        rotations: fp32 [windows, R / 2, 2] of each reader, at the first tokens of its windows.
        most: entries that each rank gives.
        order_E: of what all gave, the entries in the order of the step.
        kept_E: which of these this shard keeps; None for all.
        target_rows_E: rows of the growing kinds where those go.
    """

    rows: ExtendedRows
    phase_E: torch.Tensor
    first_windows: tuple[int, ...]
    rotations: tuple[torch.Tensor, ...]
    most: int
    order_E: torch.Tensor
    kept_E: torch.Tensor | None
    target_rows_E: torch.Tensor

    def gathered(self, entries_ED: torch.Tensor) -> torch.Tensor:
        """The entries of all ranks in the order of the step, of this rank's own."""
        pool = self.rows.group.all_gather(_filled(entries_ED, self.most), PREFILL)
        return pool.index_select(0, self.order_E)


@dataclass(frozen=True, slots=True)
class ShareIndex:
    """Attributes:
    group: over which rows are dealt.
    latents: of the window; the readers are the sequences, also those without own rows.
    sliding_ER2, compressing_ER2: rotations of the extended rows of latents.
    ring_rows_E: window ring row of each of these, -1 where it is not kept.
    windows: by ratio.
    most_rows: rows that any rank has between layers.
    wanted_counts: how many of its last own rows of each sequence go on behind the last layer.
    wanted_rows_W: these rows.
    most_wanted: of any rank.
    order_W: of the streams of all ranks, those that are wanted, in the order of the step.
    """

    group: Group
    latents: ExtendedRows
    sliding_ER2: torch.Tensor
    compressing_ER2: torch.Tensor
    ring_rows_E: torch.Tensor
    windows: dict[int, SharedWindows]
    most_rows: int
    wanted_counts: tuple[int, ...]
    wanted_rows_W: torch.Tensor
    most_wanted: int
    order_W: torch.Tensor

    def last_layer(self) -> ShareIndex:
        """The same where only wanted rows are left."""
        return replace(self, most_rows=self.most_wanted)

    def gather_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Own rows of several tensors -> those of all ranks, [ranks * most_rows, ...] each, in one
        exchange. Rows that a rank lacks hold zeros."""
        own = [tensor.flatten(1).contiguous().view(torch.uint8) for tensor in tensors]
        pool = self.group.all_gather(_filled(torch.cat(own, dim=1), self.most_rows), PREFILL)
        parts = pool.split([part.shape[1] for part in own], dim=1)
        return [
            part.contiguous().view(tensor.dtype).unflatten(1, tensor.shape[1:])
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def scatter_sums(self, partial_TD: torch.Tensor, own: int) -> torch.Tensor:
        """Partial sums of the rows that `gather_rows` gave -> the sums of the `own` first of this
        rank's."""
        return self.group.reduce_scatter(partial_TD, PREFILL)[:own]

    def gather_wanted(self, streams_WSD: torch.Tensor) -> torch.Tensor:
        """Streams of this rank's wanted rows -> those of all wanted rows, in the order of the
        step."""
        pool = self.group.all_gather(_filled(streams_WSD, self.most_wanted), PREFILL)
        return pool.index_select(0, self.order_W)


def _filled(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`rows` and zeros behind them, `count` in all."""
    lacking = count - len(rows)
    if not lacking:
        return rows
    return torch.cat([rows, rows.new_zeros(lacking, *rows.shape[1:])])
