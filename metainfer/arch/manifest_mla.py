"""Manifest of models with latent attention over chosen tokens: DeepSeek-V3.2 and GLM-5.

Names, formats and shapes are those of the releases; for GLM-5.2 and 5.3 in bf16 the list has
1,506,659,919,872 bytes, the `total_size` of GLM-5.2; V3.2 has about 689 GB.
Scales are called `.scale` in every format.
"""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.arch.attention_sides import V32_FAMILY
from metainfer.arch.shapes import DraftShape, ModelShape
from metainfer.arch.tensors import TensorSpec, linear, matrix
from metainfer.core.dtypes import DType

_PLAIN = DType.BF16


def iterate_mla(shape: ModelShape, every_expert: bool = True) -> Iterator[TensorSpec]:
    """The tensors one by one. The drafting layer is the one behind the last.

    Args:
        every_expert: otherwise the first routed expert of a layer stands for all.
    """
    width = shape.side.hidden_size
    routed = shape.experts if every_expert else 1
    yield TensorSpec("model.embed_tokens.weight", _PLAIN, (shape.vocab_size, width))
    for layer in shape.side.layers:
        prefix = f"model.layers.{layer.index}."
        yield from _attention(shape, prefix, layer.owns_queries)
        if layer.index < shape.dense_layers:
            yield from _network(shape, f"{prefix}mlp.", shape.dense_width)
        else:
            yield from _experts(shape, f"{prefix}mlp.", routed)
    yield TensorSpec("model.norm.weight", _PLAIN, (width,))
    yield TensorSpec("lm_head.weight", _PLAIN, (shape.vocab_size, width))
    if shape.draft is not None:
        yield from _draft(shape, shape.draft, routed)


def _attention(shape: ModelShape, prefix: str, chooses: bool) -> Iterator[TensorSpec]:
    side = shape.side
    width, heads, latent = side.hidden_size, side.heads, side.value_width
    nope = side.query_width - side.rope_width
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(f"{prefix}{norm}.weight", _PLAIN, (width,))
    own = f"{prefix}self_attn."
    yield from linear(shape.quantisation, f"{own}q_a_proj", side.q_rank, width)
    yield TensorSpec(f"{own}q_a_layernorm.weight", _PLAIN, (side.q_rank,))
    yield from linear(shape.quantisation, f"{own}q_b_proj", heads * side.query_width, side.q_rank)
    yield from linear(shape.quantisation, f"{own}kv_a_proj_with_mqa", side.key_width, width)
    yield TensorSpec(f"{own}kv_a_layernorm.weight", _PLAIN, (latent,))
    yield from linear(
        shape.quantisation, f"{own}kv_b_proj", heads * (nope + side.output_width), latent
    )
    yield from linear(shape.quantisation, f"{own}o_proj", width, heads * side.output_width)
    if chooses:
        yield from _indexer(shape, f"{own}indexer.")


def _indexer(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    side, index = shape.side, shape.side.indexer
    yield from linear(shape.quantisation, f"{prefix}wq_b", index.heads * index.width, side.q_rank)
    yield from linear(shape.quantisation, f"{prefix}wk", index.width, side.hidden_size)
    for name in ("weight", "bias"):
        yield TensorSpec(f"{prefix}k_norm.{name}", _PLAIN, (index.width,))
    yield TensorSpec(f"{prefix}weights_proj.weight", _PLAIN, (index.heads, side.hidden_size))


def _network(shape: ModelShape, prefix: str, inner: int) -> Iterator[TensorSpec]:
    width = shape.side.hidden_size
    for name in ("gate_proj", "up_proj"):
        yield from linear(shape.quantisation, f"{prefix}{name}", inner, width)
    yield from linear(shape.quantisation, f"{prefix}down_proj", width, inner)


def _experts(shape: ModelShape, prefix: str, listed: int) -> Iterator[TensorSpec]:
    width, inner, stored = shape.side.hidden_size, shape.expert_width, shape.quantisation
    yield TensorSpec(f"{prefix}gate.weight", _PLAIN, (shape.experts, width))
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", DType.F32, (shape.experts,))
    for expert in range(listed):
        own = f"{prefix}experts.{expert}."
        for name in ("gate_proj", "up_proj"):
            yield from matrix(stored, f"{own}{name}", stored.experts, inner, width)
        yield from matrix(stored, f"{own}down_proj", stored.experts, width, inner)
    if shape.shared_experts:
        yield from _network(shape, f"{prefix}shared_experts.", shape.shared_experts * inner)


def _draft(shape: ModelShape, draft: DraftShape, listed: int) -> Iterator[TensorSpec]:
    width = shape.side.hidden_size
    for index in range(shape.num_layers, shape.num_layers + draft.blocks):
        prefix = f"model.layers.{index}."
        yield from _attention(shape, prefix, chooses=True)
        yield from _experts(shape, f"{prefix}mlp.", listed)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield TensorSpec(f"{prefix}{name}.weight", _PLAIN, (width,))
        yield TensorSpec(f"{prefix}eh_proj.weight", _PLAIN, (width, 2 * width))
        if shape.side.family == V32_FAMILY:  # its files hold embedding and head a second time
            for name in ("embed_tokens", "shared_head.head"):
                yield TensorSpec(f"{prefix}{name}.weight", _PLAIN, (shape.vocab_size, width))
