"""Manifest of DeepSeek-V4.1: the tensors of its checkpoint from its shape.

Names, formats and shapes are those of the release: the backbone has 298.31 GB, Engram 203.07, the
drafter 7.93 and the image tower 0.97.
"""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.arch.attention import AttentionLayer
from metainfer.arch.manifest import MTP_PREFIX
from metainfer.arch.shapes import ENGRAM_BLOCK, DraftShape, ModelShape, VisionShape
from metainfer.arch.tensors import TensorSpec, linear, matrix
from metainfer.core.dtypes import DType

_PLAIN = DType.BF16


def iterate_v41(shape: ModelShape, every_expert: bool = True) -> Iterator[TensorSpec]:
    """The tensors one by one.

    Args:
        every_expert: otherwise the first routed expert of a layer stands for all.
    """
    width, vocab = shape.side.hidden_size, shape.vocab_size
    yield TensorSpec("embed.weight", _PLAIN, (vocab, width))
    for layer in shape.side.layers:
        prefix = f"layers.{layer.index}."
        yield from _engram(shape, layer.index, f"{prefix}engram.")
        yield from _block(shape, prefix, layer, shape.experts if every_expert else 1, shape.experts)
    yield TensorSpec("norm.weight", _PLAIN, (width,))
    yield TensorSpec("head.weight", _PLAIN, (vocab, width))
    if shape.draft is not None:
        yield from _draft(shape, shape.draft, every_expert)
    if shape.vision is not None:
        yield from _vision(width, shape.vision)


def _block(
    shape: ModelShape, prefix: str, layer: AttentionLayer, listed: int, experts: int
) -> Iterator[TensorSpec]:
    """A layer with `experts` routed experts, of which `listed` are named."""
    side = shape.side
    streams = side.streams.streams if side.streams else 1
    for part in ("attn", "ffn"):
        rows = (2 + streams) * streams
        yield TensorSpec(f"{prefix}hc_{part}_fn", DType.F32, (rows, streams * side.hidden_size))
        yield TensorSpec(f"{prefix}hc_{part}_base", DType.F32, (rows,))
        yield TensorSpec(f"{prefix}hc_{part}_scale", DType.F32, (3,))
        yield TensorSpec(f"{prefix}{part}_norm.weight", _PLAIN, (side.hidden_size,))
    yield from _attention(shape, f"{prefix}attn.")
    yield from _sources(shape, f"{prefix}attn.", layer)
    yield from _experts(shape, f"{prefix}ffn.", listed, experts)


def _attention(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    side = shape.side
    heads = side.heads * side.query_width
    grouped = side.output_groups * side.output_rank
    yield from linear(shape.quantisation, f"{prefix}wq_a", side.q_rank, side.hidden_size)
    yield TensorSpec(f"{prefix}q_norm.weight", _PLAIN, (side.q_rank,))
    yield from linear(shape.quantisation, f"{prefix}wq_b", heads, side.q_rank)
    yield from linear(shape.quantisation, f"{prefix}wkv", side.value_width, side.hidden_size)
    yield TensorSpec(f"{prefix}kv_norm.weight", _PLAIN, (side.value_width,))
    yield from linear(shape.quantisation, f"{prefix}wo_a", grouped, heads // side.output_groups)
    yield from linear(shape.quantisation, f"{prefix}wo_b", side.hidden_size, grouped)
    yield TensorSpec(f"{prefix}attn_sink", DType.F32, (side.heads,))


def _sources(shape: ModelShape, prefix: str, layer: AttentionLayer) -> Iterator[TensorSpec]:
    """Of layers that write entries, and of those that choose among them."""
    side, index = shape.side, shape.side.indexer
    width, entry = side.hidden_size, side.value_width
    if layer.owns_entries:
        yield TensorSpec(f"{prefix}compressor.wkv.weight", _PLAIN, (entry, width))
        if layer.ratio > 1:  # a window of one token has nothing to weigh
            yield TensorSpec(f"{prefix}compressor.wgate.weight", _PLAIN, (entry, width))
        yield TensorSpec(f"{prefix}compressor.norm.weight", _PLAIN, (entry,))
        yield TensorSpec(f"{prefix}indexer.wk.weight", _PLAIN, (index.width, entry))
        yield TensorSpec(f"{prefix}indexer.k_norm.weight", _PLAIN, (index.width,))
    if layer.owns_queries:
        rows = index.heads * index.width
        yield from linear(shape.quantisation, f"{prefix}indexer.wq_b", rows, side.q_rank)
        yield TensorSpec(f"{prefix}indexer.weights_proj.weight", _PLAIN, (index.heads, width))


def _experts(shape: ModelShape, prefix: str, listed: int, experts: int) -> Iterator[TensorSpec]:
    width, inner = shape.side.hidden_size, shape.expert_width
    yield TensorSpec(f"{prefix}gate.weight", _PLAIN, (experts, width))
    for bias in ("bias", "bias_vl"):
        yield TensorSpec(f"{prefix}gate.{bias}", DType.F32, (experts,))
    stored = shape.quantisation
    groups = [(f"{prefix}experts.{n}.", stored.experts) for n in range(listed)]
    groups.append((f"{prefix}shared_experts.", stored.linear))
    for expert, weight_format in groups:
        yield from matrix(stored, f"{expert}w1", weight_format, inner, width)
        yield from matrix(stored, f"{expert}w2", weight_format, width, inner)
        yield from matrix(stored, f"{expert}w3", weight_format, inner, width)


def _engram(shape: ModelShape, layer: int, prefix: str) -> Iterator[TensorSpec]:
    engram, side = shape.engram, shape.side
    if engram is None or layer not in engram.layers:
        return
    rows = engram.rows[engram.layers.index(layer)]
    streams = side.streams.streams if side.streams else 1
    yield TensorSpec(f"{prefix}embed.weight", DType.F8_E4M3, (rows, engram.width))
    yield TensorSpec(f"{prefix}embed.scale", DType.F8_E8M0, (rows, engram.width // ENGRAM_BLOCK))
    # A key for each stream, and one value.
    outputs, inputs = (streams + 1) * side.hidden_size, engram.rows_per_token * engram.width
    yield from linear(shape.quantisation, f"{prefix}wkv", outputs, inputs)
    for name in ("q_weight", "k_weight"):
        yield TensorSpec(f"{prefix}{name}", _PLAIN, (streams, side.hidden_size))


def _draft(shape: ModelShape, draft: DraftShape, every_expert: bool) -> Iterator[TensorSpec]:
    width, vocab, rank = shape.side.hidden_size, shape.vocab_size, draft.markov_rank
    listed = draft.experts if every_expert else 1
    for index in range(draft.blocks):
        prefix = f"{MTP_PREFIX}{index}."
        yield from _block(shape, prefix, AttentionLayer(index), listed, draft.experts)
        if index == 0:
            yield from linear(shape.quantisation, f"{prefix}main_proj", width, draft.inputs * width)
            yield TensorSpec(f"{prefix}main_norm.weight", _PLAIN, (width,))
    yield TensorSpec(f"{prefix}norm.weight", _PLAIN, (width,))
    for name in ("embed", "head"):
        yield TensorSpec(f"{prefix}markov_head.{name}.weight", _PLAIN, (vocab, rank))
    yield TensorSpec(f"{prefix}confidence_head.proj.weight", _PLAIN, (1, width + rank))


def _vision(hidden: int, tower: VisionShape) -> Iterator[TensorSpec]:
    width, inner = tower.width, tower.inner
    pixels = 3 * tower.patch**2
    yield TensorSpec("vision.patch_embed.proj.weight", _PLAIN, (width, pixels))
    for index in range(tower.layers):
        prefix = f"vision.blocks.{index}."
        for norm in ("norm1", "norm2"):
            yield TensorSpec(f"{prefix}{norm}.weight", _PLAIN, (width,))
        yield TensorSpec(f"{prefix}attn.wqkv.weight", _PLAIN, (3 * width, width))
        yield TensorSpec(f"{prefix}attn.wo.weight", _PLAIN, (width, width))
        yield TensorSpec(f"{prefix}mlp.w1.weight", _PLAIN, (2 * inner, width))
        yield TensorSpec(f"{prefix}mlp.w2.weight", _PLAIN, (width, inner))
    yield TensorSpec("vision.norm.weight", _PLAIN, (width,))
    yield TensorSpec("aligner.w1.weight", _PLAIN, (hidden, tower.downsample**2 * width))
    yield TensorSpec("aligner.w2.weight", _PLAIN, (hidden, hidden))
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        yield TensorSpec(name, _PLAIN, (hidden,))
