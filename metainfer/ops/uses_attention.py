"""What the attention side of a model runs, in every form that kernels are there for.

Caches as plain numbers and in the released byte formats; norms alone and fused with the rounding
of activations to fp8; results with a log-sum-exp where sequences are sharded. Index queries and
keys, compressors and streams are on every rank; query heads and output groups are divided.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from metainfer.arch.attention import AttentionLayer, AttentionSide
from metainfer.core.errors import UserError
from metainfer.ops.attention import DENSE, AttentionCase, MergeCase
from metainfer.ops.cache import CacheReadCase, CacheWriteCase
from metainfer.ops.compress import CompressCase
from metainfer.ops.hc import ExpandMixFp8Case, HyperCase
from metainfer.ops.index import IndexCase, decode_case
from metainfer.ops.index_codes import IndexEncodeCase, IndexWriteCase
from metainfer.ops.norm import AddRmsNormCase, RmsNormCase, RmsNormFp8Case
from metainfer.ops.quantise import QuantiseFp8Case
from metainfer.ops.rope import LayerNormRotateCase, NormRotateCase, RotateCase
from metainfer.ops.use import DECODE, PREFILL, Use, Uses

_RMS = "rms"


def attention_uses(side: AttentionSide, ranks: int, dtype: str = "bfloat16") -> tuple[Use, ...]:
    """Uses of one of `ranks` ranks.

    Raises:
        UserError: with every number that `ranks` does not divide.
    """
    _check_ranks(side, ranks)
    listing = _Listing(side, ranks, dtype)
    for layer in side.layers:
        listing.layer(layer)
    listing.head()
    return listing.uses.all()


def _check_ranks(side: AttentionSide, ranks: int) -> None:
    group = side.activation_group
    # (what, whole, smallest part that can stand alone)
    demands = [("attention heads", side.heads, 1)]
    if side.output_groups:
        demands.append(("output groups", side.output_groups, 1))
    demands += [("channels between products", width, group) for width in side.inner_widths]
    refused = [
        f"{what}: {whole} / {ranks} is not a multiple of {part}"
        for what, whole, part in demands
        if ranks > 1 and whole % (ranks * part)
    ]
    if refused:
        raise UserError(
            f"{side.name} cannot be divided over {ranks} ranks: " + "; ".join(refused),
            hint="choose a smaller --tensor-parallel-size",
        )


class _Listing:
    """The uses so far, and the shapes of one rank."""

    def __init__(self, side: AttentionSide, ranks: int, dtype: str) -> None:
        self.uses = Uses(served=False)
        self._side = side
        self._ranks = ranks
        self._dtype = dtype
        self._heads = side.heads // ranks
        self._streams: HyperCase | None = None
        if side.streams is not None:
            self._streams = HyperCase(
                side.streams.streams,
                side.hidden_size,
                side.streams.iterations,
                side.streams.eps,
                side.eps,
                dtype,
                dtype,
                normed=side.streams.shifted,
            )

    def layer(self, layer: AttentionLayer) -> None:
        self._sublayer()
        self._queries()
        self._latents()
        if layer.owns_entries:
            self._entries(layer)
        if layer.owns_queries:
            self._chosen(layer)
        self._attend(layer)
        self._outputs()
        self._sublayer()
        for width in self._side.inner_widths:
            self._quantise(1, width // self._ranks)

    def head(self) -> None:
        side, uses = self._side, self.uses
        if self._streams is not None:
            uses.add(
                "hc.head" if side.streams and side.streams.own_head else "hc.collapse",
                self._streams,
            )
        uses.add("norm.rms_norm", RmsNormCase(side.hidden_size, side.eps, self._dtype))

    def _sublayer(self) -> None:
        """What lies between the residual streams and a sublayer's first product."""
        side, uses, dtype = self._side, self.uses, self._dtype
        streams = self._streams
        if streams is None:
            uses.add("norm.add_rms_norm", AddRmsNormCase(side.hidden_size, side.eps, dtype))
        else:
            shifted = side.streams is not None and side.streams.shifted
            for op in ("hc.mix_shifted",) if shifted else ("hc.mix", "hc.mix_norm"):
                uses.add(op, streams)
            uses.add("hc.expand", streams)
            if not shifted:
                group, scale = side.activation_group, side.activation_scale
                uses.add("hc.expand_mix_fp8", ExpandMixFp8Case(streams, group, scale))
        self._norm(side.hidden_size, adds=streams is None, normed=True)

    def _norm(self, width: int, adds: bool = False, normed: bool = False) -> None:
        """Alone, and with what a product in fp8 reads."""
        side, dtype = self._side, self._dtype
        self.uses.add("norm.rms_norm", RmsNormCase(width, side.eps, dtype))
        group, scale = side.activation_group, side.activation_scale
        case = RmsNormFp8Case(width, side.eps, group, scale, adds, normed, dtype)
        self.uses.add("norm.rms_norm_fp8", case)

    def _queries(self) -> None:
        side, dtype = self._side, self._dtype
        self._norm(side.q_rank)
        widths = (self._heads, side.query_width, side.rope_width)
        if side.norms_heads:
            case = NormRotateCase(*widths, weighted=False, eps=side.eps, dtype=dtype)
            self.uses.add("rope.norm_rotate", case)
        else:
            self.uses.add("rope.rotate", RotateCase(*widths, dtype=dtype))

    def _latents(self) -> None:
        """The latent of each token: into the window, or where there is none, as its entry."""
        side, dtype, uses = self._side, self._dtype, self.uses
        width, rope = side.value_width, side.rope_width
        if side.window:
            case = NormRotateCase(1, width, rope, weighted=True, eps=side.eps, dtype=dtype)
            uses.add("rope.norm_rotate", case)
        kept = side.window_format if side.window else side.entry_format
        normed = 0 if side.window else width
        for form in (kept, DENSE):
            write = CacheWriteCase(form, side.key_width, rope, _RMS, normed, side.eps, dtype)
            uses.add("cache.write", write)
        if side.window:
            uses.add("cache.read", CacheReadCase(side.window_format, dtype), (PREFILL,))

    def _entries(self, layer: AttentionLayer) -> None:
        """Entries that are pooled or projected, and their index keys."""
        side, dtype = self._side, self._dtype
        index = side.indexer
        rotates = index.compresses_keys  # the compressors of V4 rotate what they pool
        if side.window:
            self._pooled(layer, side.value_width, side.rope_width if rotates else 0)
            rope = 0 if rotates else side.rope_width
            for form in (side.entry_format, DENSE):
                case = CacheWriteCase(form, side.value_width, rope, dtype=dtype)
                self.uses.add("cache.write", case)
        if layer.topk and (layer.owns_queries or not side.window):
            self._index_keys(layer)

    def _pooled(self, layer: AttentionLayer, width: int, rope_width: int) -> None:
        """A window of one token is normed and no more."""
        side, dtype = self._side, self._dtype
        if layer.ratio == 1:
            self.uses.add("norm.rms_norm", RmsNormCase(width, side.eps, dtype))
            return
        case = CompressCase(layer.ratio, width, rope_width, layer.overlap, side.eps, dtype)
        self.uses.add("attention.compress", case, (PREFILL,))
        self.uses.add("attention.compress_decode", case, (DECODE,))
        self.uses.add("attention.compress_step", case, (DECODE,))

    def _index_keys(self, layer: AttentionLayer) -> None:
        index, eps, dtype = self._side.indexer, self._side.eps, self._dtype
        width, rope = index.width, index.rope_width
        shape: dict[str, Any] = {"interleaved": index.interleaved, "leading": index.rope_leading}
        if index.compresses_keys:
            self._pooled(layer, width, rope)
        elif index.key_norm == "layer":
            case = LayerNormRotateCase(width, rope, **shape, dtype=dtype)
            self.uses.add("norm.layer_norm_rotate", case)
        for form in index.coded_formats:
            write = IndexWriteCase(form, width, hadamard=index.hadamard, dtype=dtype)
            if not index.compresses_keys:
                norm_eps = write.eps if index.key_norm == "layer" else eps
                write = replace(write, norm=index.key_norm, eps=norm_eps, rope_width=rope, **shape)
            self.uses.add("cache.write_index", write)

    def _chosen(self, layer: AttentionLayer) -> None:
        """Index queries, and the choice of entries."""
        index, dtype, uses = self._side.indexer, self._dtype, self.uses
        heads, width, rope = index.heads, index.width, index.rope_width
        shape: dict[str, Any] = {"interleaved": index.interleaved, "leading": index.rope_leading}
        uses.add("rope.rotate", RotateCase(heads, width, rope, dtype=dtype, **shape))
        for form in index.coded_formats:
            encode = IndexEncodeCase(
                form, heads, width, rope, **shape, hadamard=index.hadamard, dtype=dtype
            )
            uses.add("index.encode_queries", encode)
        candidates = layer.publishes or layer.searches
        for form in index.key_formats:
            case = IndexCase(
                heads,
                width,
                layer.topk,
                layer.ratio,
                dtype,
                form,
                index.candidate_blocks if candidates else 0,
                index.candidate_block,
                layer.publishes,
            )
            uses.add("attention.index_topk", case, (PREFILL,))
            uses.add("attention.index_topk_decode", decode_case(case), (DECODE,))

    def _attend(self, layer: AttentionLayer) -> None:
        side, uses = self._side, self.uses
        plain = AttentionCase(
            self._heads,
            side.value_width,
            side.window,
            layer.ratio,
            layer.topk,
            self._dtype,
            side.rope_extra,
            scale=side.score_scale,
            sink=side.sinks,
        )
        entries = side.entry_format if layer.ratio else DENSE
        kept = replace(plain, entry_format=entries)
        for case in dict.fromkeys((plain, kept)):
            uses.add("attention.sparse_prefill", case, (PREFILL,))
        if side.window:
            kept = replace(kept, window_format=side.window_format)
        for case in dict.fromkeys((plain, kept)):
            uses.add("attention.sparse_decode", case, (DECODE,))
        if not side.window:
            # Entries of every token are worth sharding: each rank holds some of a sequence.
            uses.add("attention.sparse_decode", replace(kept, lse=True), (DECODE,))
            merge = MergeCase(self._heads, side.value_width, self._dtype)
            uses.add("attention.merge", merge, (DECODE,))

    def _outputs(self) -> None:
        """From the results of heads to what the output products read."""
        side, dtype = self._side, self._dtype
        rope = 0 if side.absorbed else side.rope_width
        if rope:
            case = RotateCase(self._heads, side.output_width, rope, inverse=True, dtype=dtype)
            self.uses.add("rope.rotate", case)
        self._quantise(self._heads, side.output_width, rope)
        if side.output_groups:
            self._quantise(1, side.output_groups // self._ranks * side.output_rank)

    def _quantise(self, heads: int, width: int, rope_width: int = 0) -> None:
        side = self._side
        group, scale = side.activation_group, side.activation_scale
        case = QuantiseFp8Case(heads, width, group, scale, rope_width, self._dtype)
        self.uses.add("quantise.fp8", case)
