"""What a sequence keeps between steps, as cache kinds described by the Arch.

A kind has one scope. SEQUENCE kinds are rings: one block per sequence, written at
`position % rows_per_block`. TOKENS kinds grow: block b of a sequence's block table covers tokens
[b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS) in every layer, so that one block id addresses the rows
of all growing kinds. Kinds are keyed by the layer that owns them (`source_layer`), which is not
always the one that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from metainfer.arch.record import Arch, LayerKind

BLOCK_TOKENS = 128
"""Tokens per block: the largest compression ratio, so that every block holds whole entries."""


def blocks_for(num_tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold `num_tokens` tokens. Where caches are divided over ranks, a block has
    BLOCK_TOKENS tokens on each, and `block_tokens` in all."""
    return -(-num_tokens // block_tokens)


class Scope(StrEnum):
    SEQUENCE = "sequence"
    TOKENS = "tokens"


class Kind(StrEnum):
    WINDOW = "window"  # latents of the last tokens
    COMPRESSOR = "compressor"  # (value, score) rows of the windows that are not closed yet
    INDEX_COMPRESSOR = "index_compressor"
    ENTRIES = "entries"  # compressed latents
    INDEX_KEYS = "index_keys"


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One kind of state of one layer.

    Attributes:
        rows_per_block: ring rows (SEQUENCE) or rows per BLOCK_TOKENS tokens (TOKENS).
        row_width: elements per row.
        fp32: stored as fp32 whatever the cache dtype is.
    """

    kind: Kind
    source_layer: int
    scope: Scope
    rows_per_block: int
    row_width: int
    fp32: bool = False


def cache_kinds(
    arch: Arch, draft_rows: int = 0, layers: range | None = None
) -> tuple[CacheKind, ...]:
    """All kinds of `arch`, or of some of its layers. Rings hold `draft_rows` more than needed, so
    that rejected rows of a speculative step never overwrite rows that are still visible."""
    kinds: list[CacheKind] = []
    for layer in arch.layers if layers is None else arch.layers[layers.start : layers.stop]:
        n = layer.index

        def ring(kind: Kind, rows: int, width: int, fp32: bool, n: int = n) -> CacheKind:
            return CacheKind(kind, n, Scope.SEQUENCE, rows + draft_rows, width, fp32)

        def paged(kind: Kind, rows: int, width: int, n: int = n) -> CacheKind:
            return CacheKind(kind, n, Scope.TOKENS, rows, width)

        kinds.append(ring(Kind.WINDOW, arch.sliding_window, arch.head_dim, False))
        if layer.kind is LayerKind.SLIDING:
            continue
        rows = BLOCK_TOKENS // layer.ratio
        kinds.append(paged(Kind.ENTRIES, rows, arch.head_dim))
        if layer.kind is LayerKind.COMPRESSED_SPARSE:
            # Overlapping windows: an entry mixes two halves of two windows, value and score each.
            span = 2 * layer.ratio
            kinds.append(ring(Kind.COMPRESSOR, span, 2 * 2 * arch.head_dim, True))
            kinds.append(ring(Kind.INDEX_COMPRESSOR, span, 2 * 2 * arch.index_head_dim, True))
            kinds.append(paged(Kind.INDEX_KEYS, rows, arch.index_head_dim))
        else:
            kinds.append(ring(Kind.COMPRESSOR, layer.ratio, 2 * arch.head_dim, True))
    return tuple(kinds)


def spans(arch: Arch) -> dict[int, int]:
    """Tokens that an entry mixes, by ratio; the compressors' rings hold as many."""
    return {
        layer.ratio: layer.ratio * (1 + (layer.kind is LayerKind.COMPRESSED_SPARSE))
        for layer in arch.layers
        if layer.ratio
    }
