"""CacheStorage: the memory of all cache kinds. Who owns which block is the block pool's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metainfer.arch.cache_kinds import CacheKind, Kind, Scope, cache_kinds
from metainfer.arch.record import Arch


class CacheStorage:
    """One tensor for each kind of each layer, [blocks * rows per block, width].

    Memory is not cleared when it is allocated, so pages that no sequence needs are never touched.
    With `spare`, one slot and one block behind the others belong to nobody: steps of fixed shapes
    write there what is not wanted, and nothing reads it.

    Attributes:
        draft_rows: rows that rings hold beyond what is visible.
        dtype: format of latents, entries and index keys; compressor states are fp32.
        spare_block: number of the spare block; None without.
        nbytes: of all kinds.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        num_slots: int,
        num_blocks: int,
        cache_dtype: torch.dtype,
        draft_rows: int,
        device: torch.device | str,
        spare: bool = False,
    ) -> None:
        self.draft_rows = draft_rows
        self.dtype = cache_dtype
        self.spare_block = num_blocks if spare else None
        self._rows: dict[tuple[Kind, int], torch.Tensor] = {}
        self._rings: list[tuple[CacheKind, torch.Tensor]] = []
        for kind in cache_kinds(arch, draft_rows):
            blocks = (num_slots if kind.scope is Scope.SEQUENCE else num_blocks) + spare
            rows_ND = torch.empty(
                (blocks * kind.rows_per_block, kind.row_width),
                dtype=torch.float32 if kind.fp32 else cache_dtype,
                device=device,
            )
            self._rows[kind.kind, kind.source_layer] = rows_ND
            if kind.scope is Scope.SEQUENCE:
                self._rings.append((kind, rows_ND))
        self.nbytes = sum(rows_ND.nbytes for rows_ND in self._rows.values())

    def rows(self, kind: Kind, layer: int) -> torch.Tensor:
        """The rows of `kind` that `layer` owns, [blocks * rows per block, width]."""
        return self._rows[kind, layer]

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Zero the rings of `slots` before a new sequence uses them.

        No row of a ring is read before its sequence has written it; this leaves nothing of the
        sequence before in memory either.
        """
        for kind, rows_ND in self._rings:
            blocks = rows_ND.view(-1, kind.rows_per_block, kind.row_width)
            for slot in slots:
                blocks[slot].zero_()
