"""From a config to its attention side, for each family whose kernels are here.

Only keys that attention depends on are read; each is checked, all problems are named at once.
Sources: the released configs and the vendors' inference code of each family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

from metainfer.arch.attention import (
    KEPT_KEYS,
    AttentionLayer,
    AttentionSide,
    HyperStreams,
    IndexerShape,
)
from metainfer.arch.config_fields import ConfigFields
from metainfer.arch.record import Arch, LayerKind

V41_FAMILY = "deepseek_v41"
V32_FAMILY = "deepseek_v32"
GLM_FAMILY = "glm_moe_dsa"

_LATENT_WIDTH = 512
_MOST_LAYERS = 1024
"""Of models whose config has no list as long: a slip of the pen must not fill the memory."""


def of_v4(arch: Arch) -> AttentionSide:
    """Of DeepSeek-V4, whose models are served."""
    layers = tuple(
        AttentionLayer(
            layer.index,
            layer.ratio,
            arch.index_topk if layer.kind is LayerKind.COMPRESSED_SPARSE else 0,
            owns_entries=layer.ratio > 0,
            overlap=layer.kind is LayerKind.COMPRESSED_SPARSE,
            owns_queries=layer.kind is LayerKind.COMPRESSED_SPARSE,
        )
        for layer in arch.layers
    )
    return AttentionSide(
        family=arch.family,
        name=arch.name,
        hidden_size=arch.hidden_size,
        layers=layers,
        heads=arch.num_heads,
        q_rank=arch.q_lora_rank,
        query_width=arch.head_dim,
        value_width=arch.head_dim,
        rope_width=arch.rope_head_dim,
        rope_extra=0,
        absorbed=False,
        window=arch.sliding_window,
        norms_heads=True,
        sinks=True,
        score_scale=None,
        eps=arch.rms_norm_eps,
        streams=HyperStreams(
            arch.hc_mult, arch.hc_sinkhorn_iters, arch.hc_eps, shifted=False, own_head=True
        ),
        indexer=IndexerShape(
            arch.index_num_heads,
            arch.index_head_dim,
            arch.rope_head_dim,
            rope_leading=False,
            interleaved=True,
            key_norm="rms",
            compresses_keys=True,
            hadamard=True,
            key_formats=(KEPT_KEYS, "index_fp4", "dense"),
        ),
        window_format="v4_fp8",
        entry_format="v4_fp8",
        output_width=arch.head_dim,
        output_groups=arch.o_groups,
        output_rank=arch.o_lora_rank,
        inner_widths=(arch.moe_intermediate_size,),
        activation_group=128,
        activation_scale="e8m0",
        max_model_len=arch.max_model_len,
    )


def _v41(config: Mapping[str, Any], name: str) -> AttentionSide:
    """DeepSeek-V4.1: entries and chosen lists are shared between layers, streams are shifted."""
    text = config.get("text_config")
    fields = ConfigFields(text if isinstance(text, Mapping) else {}, name)
    _leave_the_rest(fields, text)
    if not isinstance(text, Mapping):
        fields.problem("text_config must be an object")
    layers = _v41_layers(fields)
    side = AttentionSide(
        family=V41_FAMILY,
        name=name,
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        heads=fields.integer("num_attention_heads"),
        q_rank=fields.integer("q_lora_rank"),
        query_width=fields.integer("head_dim"),
        value_width=fields.integer("head_dim"),
        rope_width=fields.integer("qk_rope_head_dim", minimum=2),
        rope_extra=0,
        absorbed=False,
        window=fields.integer("sliding_window"),
        norms_heads=False,
        sinks=True,
        score_scale=None,
        eps=fields.number("rms_norm_eps"),
        streams=HyperStreams(
            fields.integer("hc_mult"),
            fields.integer("hc_sinkhorn_iters"),
            fields.number("hc_eps"),
            shifted=True,
            own_head=False,
        ),
        indexer=IndexerShape(
            fields.integer("index_n_heads"),
            fields.integer("index_head_dim"),
            fields.integer("qk_rope_head_dim", minimum=2),
            rope_leading=False,
            interleaved=True,
            key_norm="rms",
            compresses_keys=False,
            hadamard=False,
            key_formats=(KEPT_KEYS, "index_fp4"),
            candidate_blocks=fields.integer("candidate_topk_blocks"),
            candidate_block=fields.integer("candidate_block_size"),
        ),
        window_format="v41_fp8",
        entry_format="v41_fp4",
        output_width=fields.integer("head_dim"),
        output_groups=fields.integer("o_groups"),
        output_rank=fields.integer("o_lora_rank"),
        inner_widths=(fields.integer("moe_intermediate_size"),),
        activation_group=32,
        activation_scale="e8m0",
        max_model_len=fields.integer("max_position_embeddings"),
    )
    fields.finish()
    return side


def _v41_layers(fields: ConfigFields) -> tuple[AttentionLayer, ...]:
    count = fields.integer("num_hidden_layers")
    ratios = fields.integers("compress_ratios")
    owners = set(fields.integers("kv_source_layer_ids"))
    choosers = set(fields.integers("index_source_layer_ids"))
    publisher = fields.integer("candidate_source_layer_id", minimum=0)
    topk = fields.integer("index_topk")
    if len(ratios) < count:
        fields.problem(f"compress_ratios has {len(ratios)} entries; {count} are expected")
    if unhandled := set(ratios[:count]) - {0, 1, 2}:
        fields.problem(f"compress_ratios has {sorted(unhandled)}; only 0, 1 and 2 are handled")
    layers = []
    for index, ratio in enumerate(ratios[:count]):
        chooses = index in choosers
        layers.append(
            AttentionLayer(
                index,
                ratio,
                topk if ratio else 0,
                owns_entries=index in owners,
                owns_queries=chooses,
                publishes=index == publisher,
                searches=chooses and index > publisher,
            )
        )
        if ratio and not any(layer.owns_entries for layer in layers):
            fields.problem(f"layer {index} has a ratio and no layer before it owns entries")
    return tuple(layers)


def _mla(config: Mapping[str, Any], name: str, family: str) -> AttentionSide:
    """Latent attention over chosen tokens, absorbed: DeepSeek-V3.2 and GLM-5."""
    fields = ConfigFields(config, name)
    _leave_the_rest(fields, config)
    nope = fields.integer("qk_nope_head_dim")
    rope = fields.integer("qk_rope_head_dim", minimum=2)
    latent = fields.integer("kv_lora_rank")
    if latent != _LATENT_WIDTH:
        fields.problem(f"kv_lora_rank is {latent}; only {_LATENT_WIDTH} is handled")
    side = AttentionSide(
        family=family,
        name=name,
        hidden_size=fields.integer("hidden_size"),
        layers=_mla_layers(fields),
        heads=fields.integer("num_attention_heads"),
        q_rank=fields.integer("q_lora_rank"),
        query_width=nope + rope,
        value_width=latent,
        rope_width=rope,
        rope_extra=rope,
        absorbed=True,
        window=0,
        norms_heads=False,
        sinks=False,
        score_scale=(nope + rope) ** -0.5 * _softmax_factor(fields),
        eps=fields.number("rms_norm_eps"),
        streams=None,
        indexer=IndexerShape(
            fields.integer("index_n_heads"),
            fields.integer("index_head_dim"),
            rope,
            rope_leading=True,
            interleaved=fields.get("indexer_rope_interleave", False) is True,
            key_norm="layer",
            compresses_keys=False,
            hadamard=True,
            key_formats=(KEPT_KEYS, "dense"),
        ),
        window_format="",
        entry_format="mla_fp8",
        output_width=fields.integer("v_head_dim"),
        output_groups=0,
        output_rank=0,
        inner_widths=(
            fields.integer("moe_intermediate_size"),
            fields.integer("intermediate_size"),
        ),
        activation_group=128,
        activation_scale="fp32",
        max_model_len=fields.integer("max_position_embeddings"),
    )
    fields.finish()
    return side


def _mla_layers(fields: ConfigFields) -> tuple[AttentionLayer, ...]:
    count, topk = fields.integer("num_hidden_layers"), fields.integer("index_topk")
    if count > _MOST_LAYERS:
        fields.problem(f"num_hidden_layers is {count}; at most {_MOST_LAYERS} are handled")
        count = 1
    frequency = fields.integer("index_topk_freq", default=1)
    offset = fields.integer("index_skip_topk_offset", minimum=0, default=2)
    kinds = fields.get("indexer_types")
    if kinds is None:
        chooses = [max(index - offset + 1, 0) % frequency == 0 for index in range(count)]
    else:
        chooses = [kind == "full" for kind in kinds] if isinstance(kinds, list) else []
        if len(chooses) != count or not set(kinds) <= {"full", "shared"}:
            fields.problem(f"indexer_types must be a list of {count} times 'full' or 'shared'")
            chooses = [True] * count
    if chooses and not chooses[0]:
        fields.problem("the first layer has no indexer and none before it to share")
    return tuple(
        AttentionLayer(index, 1, topk, owns_entries=True, owns_queries=own)
        for index, own in enumerate(chooses)
    )


def _softmax_factor(fields: ConfigFields) -> float:
    """What YaRN multiplies the scores by: the square of 0.1 mscale_all_dim ln(factor) + 1."""
    scaling = fields.get("rope_scaling")
    if scaling is None:
        return 1.0
    known: Mapping[str, Any] = scaling if isinstance(scaling, Mapping) else {}
    values = [float(v) for v in map(known.get, ("factor", "mscale_all_dim")) if _is_number(v)]
    if len(values) != 2:
        fields.problem("rope_scaling must be null, or an object with factor and mscale_all_dim")
        return 1.0
    factor, mscale = values
    return (0.1 * mscale * math.log(factor) + 1) ** 2 if factor > 1 else 1.0


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value < math.inf


def _leave_the_rest(fields: ConfigFields, config: Any) -> None:
    """Keys of what is not attention are not judged here."""
    fields.ignore(tuple(config) if isinstance(config, Mapping) else ())


ATTENTION_ONLY: Mapping[str, Callable[[Mapping[str, Any], str], AttentionSide]] = MappingProxyType(
    {
        V41_FAMILY: _v41,
        V32_FAMILY: lambda config, name: _mla(config, name, V32_FAMILY),
        GLM_FAMILY: lambda config, name: _mla(config, name, GLM_FAMILY),
    }
)
"""Families whose attention side alone is here, by model_type."""
