"""The attention side of a model: what its kernels have to know of it, and no more.

Models whose experts or whole are not served yet have this record too, so that their kernels can be
written, proved and measured first.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT_KEYS = "index_fp8"
"""How coded index keys are kept where no flag and no record says otherwise, by engine and plan: a
byte a channel, as other engines keep them; fewer bits are for models that were judged."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer. Where a layer owns no entries, keys or queries it uses those of the latest layer
    before it that does.

    Attributes:
        ratio: tokens per entry; 0 where the layer sees its window alone.
        topk: entries that a row attends to at most; 0 for all that it sees.
        owns_entries: the layer writes entries, and index keys where it has a top-k.
        overlap: an entry mixes two windows of tokens.
        owns_queries: the layer chooses entries, with index queries of its own.
        publishes, searches: it names candidates, or chooses among those that were named.
    """

    index: int
    ratio: int = 0
    topk: int = 0
    owns_entries: bool = False
    overlap: bool = False
    owns_queries: bool = False
    publishes: bool = False
    searches: bool = False


@dataclass(frozen=True, slots=True)
class HyperStreams:
    """Hyper-connections around sublayers.

    Attributes:
        shifted: a sublayer collapses the streams with the weights of the sublayer before it.
        own_head: the last collapse has weights of its own; otherwise it is the last sublayer's.
    """

    streams: int
    iterations: int
    eps: float
    shifted: bool
    own_head: bool


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """Attributes:
    heads, width: of index queries.
    rope_width: rotated channels of queries and keys; those at the front where `rope_leading`.
    interleaved: as of `ops.rope.RotateCase`.
    key_norm: "rms" or "layer", the norm of index keys.
    compresses_keys: index keys have a compressor of their own; otherwise they are projected.
    hadamard: queries and keys are rotated by the Hadamard matrix before they are rounded.
    key_formats: how index keys and queries can be kept, `KEPT_KEYS` first.
    candidate_blocks, candidate_block: as of `ops.index.IndexCase`.
    """

    heads: int
    width: int
    rope_width: int
    rope_leading: bool
    interleaved: bool
    key_norm: str
    compresses_keys: bool
    hadamard: bool
    key_formats: tuple[str, ...]
    candidate_blocks: int = 0
    candidate_block: int = 8

    @property
    def coded_formats(self) -> tuple[str, ...]:
        """Those that are not plain numbers."""
        return tuple(form for form in self.key_formats if form != "dense")


@dataclass(frozen=True, slots=True)
class AttentionSide:
    """Widths in elements.

    Attributes:
        heads: query heads of the whole model.
        query_width: of a head's query as projected, its `rope_width` rotated channels last.
        value_width: of a latent or entry as value.
        rope_extra: channels of a key that are not part of the value; the rotated ones, if any.
        absorbed: queries are brought to the width of keys after they are rotated, and results to
            the width of values after attention.
        window: tokens that a row sees directly; 0 where there is no window.
        norms_heads: each head of a query is divided by its own root mean square.
        sinks: each head has a sink.
        score_scale: None for value_width^-0.5.
        streams: None for one residual stream.
        window_format, entry_format: how caches keep rows, in names of `ops.formats`.
        output_width: of a head's result, as the output product reads it.
        output_groups: groups of heads with a first output product of their own; 0 where there is
            one output product.
        output_rank: outputs of a group's product.
        inner_widths: channels between the products of an expert, and of a layer without experts.
        activation_group: channels of activations that share an fp8 scale.
        activation_scale: "e8m0" or "fp32".
    """

    family: str
    name: str
    hidden_size: int
    layers: tuple[AttentionLayer, ...]
    heads: int
    q_rank: int
    query_width: int
    value_width: int
    rope_width: int
    rope_extra: int
    absorbed: bool
    window: int
    norms_heads: bool
    sinks: bool
    score_scale: float | None
    eps: float
    streams: HyperStreams | None
    indexer: IndexerShape
    window_format: str
    entry_format: str
    output_width: int
    output_groups: int
    output_rank: int
    inner_widths: tuple[int, ...]
    activation_group: int
    activation_scale: str
    max_model_len: int

    @property
    def key_width(self) -> int:
        return self.value_width + self.rope_extra

    def owners(self) -> tuple[AttentionLayer, ...]:
        """Layers that write entries."""
        return tuple(layer for layer in self.layers if layer.owns_entries)

    def choosers(self) -> tuple[AttentionLayer, ...]:
        """Layers that choose entries."""
        return tuple(layer for layer in self.layers if layer.owns_queries)
