"""CacheStorage: the memory of all cache kinds. Who owns which block is the block pool's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metainfer.arch.cache_kinds import CacheKind, Kind, Scope, cache_kinds
from metainfer.arch.record import Arch
from metainfer.ops.cache import DENSE
from metainfer.ops.cache_formats import CacheFormats
from metainfer.ops.formats import INDEX_FORMATS


class CacheStorage:
    """One tensor for each kind of each layer, [blocks * rows per block, width] of plain numbers or
    uint8 [.., row bytes]; coded index keys are two, codes and scales.

    Memory is not cleared when it is allocated, so pages that no sequence needs are never touched.
    With `spare`, one slot and one block behind the others belong to nobody: steps of fixed shapes
    write there what is not wanted, and nothing reads it.

    Attributes:
        draft_rows: rows that rings hold beyond what is visible.
        formats: of latents, entries and index keys; compressor states are fp32.
        spare_block: number of the spare block; None without.
        nbytes: of all kinds.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        num_slots: int,
        num_blocks: int,
        formats: CacheFormats,
        draft_rows: int,
        device: torch.device | str,
        spare: bool = False,
        layers: range | None = None,
    ) -> None:
        """`layers`: whose kinds it has; None for all."""
        self.draft_rows = draft_rows
        self.formats = formats
        self.spare_block = num_blocks if spare else None
        self._rows: dict[tuple[Kind, int], tuple[torch.Tensor, ...]] = {}
        self._rings: list[tuple[CacheKind, torch.Tensor]] = []
        for kind in cache_kinds(arch, draft_rows, layers):
            blocks = (num_slots if kind.scope is Scope.SEQUENCE else num_blocks) + spare
            rows = tuple(
                torch.empty((blocks * kind.rows_per_block, width), dtype=dtype, device=device)
                for width, dtype in _columns(kind, formats)
            )
            self._rows[kind.kind, kind.source_layer] = rows
            if kind.scope is Scope.SEQUENCE:
                self._rings.append((kind, rows[0]))
        self.nbytes = sum(part.nbytes for rows in self._rows.values() for part in rows)

    def rows(self, kind: Kind, layer: int) -> torch.Tensor:
        """The rows of `kind` that `layer` owns: all of a row is in one tensor."""
        (rows_ND,) = self._rows[kind, layer]
        return rows_ND

    def index_keys(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Index keys that `layer` owns: plain numbers, or codes and scales."""
        return self._rows[Kind.INDEX_KEYS, layer]

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Zero the rings of `slots` before a new sequence uses them.

        No row of a ring is read before its sequence has written it; this leaves nothing of the
        sequence before in memory either.
        """
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for kind, rows_ND in self._rings:
            blocks = rows_ND.view(-1, kind.rows_per_block, rows_ND.shape[1])
            by_dtype.setdefault(rows_ND.dtype, []).extend(blocks[slot] for slot in slots)
        for alike in by_dtype.values():
            torch._foreach_zero_(alike)  # in one kernel


def _columns(kind: CacheKind, formats: CacheFormats) -> list[tuple[int, torch.dtype]]:
    """Width and type of the tensors that hold the rows of `kind`."""
    if kind.fp32:
        return [(kind.row_width, torch.float32)]
    is_keys = kind.kind is Kind.INDEX_KEYS
    if is_keys and formats.key_format != DENSE:
        form = INDEX_FORMATS[formats.key_format]
        return [(form.code_bytes, torch.uint8), (form.scale_bytes, torch.uint8)]
    if not is_keys and formats.latent_format != DENSE:
        return [(formats.row_bytes(kind), torch.uint8)]
    plain = formats.index_keys if is_keys else formats.latents
    return [(kind.row_width, getattr(torch, plain))]
