"""What a sequence keeps, as cache kinds, from a model's shape: also of models not served yet.

For DeepSeek-V4 these are the kinds of `arch.cache_kinds`, which the engine allocates.
"""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.arch.attention import AttentionLayer, AttentionSide
from metainfer.arch.cache_kinds import BLOCK_TOKENS, CacheKind, Kind, Scope
from metainfer.arch.shapes import ModelShape


def kinds_of(shape: ModelShape, draft_rows: int = 0) -> tuple[CacheKind, ...]:
    """Of all layers, keyed by the layer that owns them.

    Args:
        draft_rows: more rows of every ring, as of `cache_kinds.cache_kinds`.
    """
    kinds: list[CacheKind] = []
    for layer in shape.side.layers:
        kinds += _of_layer(shape.side, layer, draft_rows)
    return tuple(kinds)


def draft_kinds(shape: ModelShape, draft_rows: int = 0) -> tuple[CacheKind, ...]:
    """Of the drafting blocks, which count on behind the last layer. Those of models with a window
    see their window alone; the others are layers that choose, as the first one does."""
    blocks = shape.draft.blocks if shape.draft is not None else 0
    kinds: list[CacheKind] = []
    for index in range(shape.num_layers, shape.num_layers + blocks):
        layer = AttentionLayer(index)
        if not shape.side.window:
            topk = shape.side.layers[0].topk
            layer = AttentionLayer(index, 1, topk, owns_entries=True, owns_queries=True)
        kinds += _of_layer(shape.side, layer, draft_rows)
    return tuple(kinds)


def _of_layer(side: AttentionSide, layer: AttentionLayer, draft_rows: int) -> Iterator[CacheKind]:
    def ring(kind: Kind, rows: int, width: int, fp32: bool) -> CacheKind:
        return CacheKind(kind, layer.index, Scope.SEQUENCE, rows + draft_rows, width, fp32)

    if side.window:
        yield ring(Kind.WINDOW, side.window, side.key_width, fp32=False)
    if not layer.owns_entries:
        return
    rows, index = BLOCK_TOKENS // layer.ratio, side.indexer
    # Windows that overlap mix two halves of two of them; value and score each.
    halves = 2 if layer.overlap else 1
    span, values = halves * layer.ratio, 2 * halves
    yield CacheKind(Kind.ENTRIES, layer.index, Scope.TOKENS, rows, side.key_width)
    if layer.ratio > 1:
        yield ring(Kind.COMPRESSOR, span, values * side.value_width, fp32=True)
    if layer.topk and layer.owns_queries:
        if layer.ratio > 1 and index.compresses_keys:
            yield ring(Kind.INDEX_COMPRESSOR, span, values * index.width, fp32=True)
        yield CacheKind(Kind.INDEX_KEYS, layer.index, Scope.TOKENS, rows, index.width)


def sources_of(side: AttentionSide, layers: range) -> frozenset[int]:
    """Layers whose entries and index keys some of `layers` read, their own among them. A stage of
    a pipeline that does not have such a layer keeps a copy of what it wrote."""
    owners = [layer.index for layer in side.owners()]
    found = set(layers)
    for layer in side.layers:
        before = [owner for owner in owners if owner <= layer.index]
        if layer.index in layers and layer.ratio and before:
            found.add(before[-1])
    return frozenset(found)
