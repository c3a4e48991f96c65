"""From a config to the shape of the whole model, for each family that can be planned for.

Sources: the released configs and the lists of tensors of the released checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metainfer.arch.attention import AttentionSide
from metainfer.arch.attention_sides import GLM_FAMILY, V32_FAMILY, V41_FAMILY, of_v4
from metainfer.arch.config_fields import ConfigFields
from metainfer.arch.families import arch_from_config, config_of, read_attention
from metainfer.arch.record import Arch, Quantisation, RouterKind, WeightFormat
from metainfer.arch.shapes import DraftShape, EngramShape, ModelShape, VisionShape
from metainfer.core.dtypes import DType

_EXPERT_FORMATS = {"fp4": WeightFormat.FP4_GROUP, "fp8": WeightFormat.FP8_BLOCK}


def read_shape(path_or_name: str | Path) -> ModelShape:
    """The shape of a checkpoint directory, a config.json file, or a known name.

    Raises:
        UserError, CheckpointError: as `families.read_arch`.
    """
    config, side = config_of(path_or_name), read_attention(path_or_name)
    if side.family == V41_FAMILY:
        return _v41(config, side)
    if side.family in (V32_FAMILY, GLM_FAMILY):
        return _mla(config, side)
    return shape_of_v4(arch_from_config(config, side.name))


def shape_of_v4(arch: Arch) -> ModelShape:
    """Of DeepSeek-V4, which is served."""
    draft = None
    if arch.num_mtp_layers:
        draft = DraftShape(arch.num_mtp_layers, arch.num_experts, arch.experts_per_token, rows=1)
    return ModelShape(
        side=of_v4(arch),
        vocab_size=arch.vocab_size,
        quantisation=arch.quantisation,
        experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
        shared_experts=arch.num_shared_experts,
        expert_width=arch.moe_intermediate_size,
        hash_layers=sum(layer.router is RouterKind.HASH for layer in arch.layers),
        draft=draft,
        arch=arch,
    )


def _v41(config: Mapping[str, Any], side: AttentionSide) -> ModelShape:
    text = config["text_config"]
    fields = _Fields(text, side.name)
    blocks = fields.integer("num_nextn_predict_layers", minimum=0, default=0)
    draft = None
    if blocks:
        draft = DraftShape(
            blocks,
            fields.integer("dspark_n_routed_experts"),
            fields.integer("dspark_num_experts_per_tok"),
            rows=fields.integer("dspark_block_size"),
            inputs=len(fields.integers("dspark_target_layer_ids")),
            markov_rank=fields.integer("dspark_markov_rank"),
        )
    layers = fields.integers("engram_layer_ids") if fields.has("engram_layer_ids") else ()
    engram = None
    if layers:
        sizes = fields.integer("engram_max_ngram_size", minimum=2) - 1  # of 2 tokens and more
        engram = EngramShape(
            layers,
            fields.integers("engram_num_embeddings"),
            fields.integer("engram_head_dim"),
            sizes * fields.integer("engram_n_heads"),
        )
        if len(engram.rows) != len(layers):
            fields.problem("engram_num_embeddings must have a number for each of engram_layer_ids")
    shape = _with_experts(fields, side, draft=draft, engram=engram, vision=_vision(config, side))
    fields.finish()
    return shape


def _vision(config: Mapping[str, Any], side: AttentionSide) -> VisionShape | None:
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return None
    fields = _Fields(tower, side.name)
    shape = VisionShape(
        fields.integer("num_hidden_layers"),
        fields.integer("hidden_size"),
        fields.integer("intermediate_size"),
        fields.integer("patch_size"),
        fields.integer("downsample"),
    )
    fields.finish()
    return shape


def _mla(config: Mapping[str, Any], side: AttentionSide) -> ModelShape:
    fields = _Fields(config, side.name)
    blocks = fields.integer("num_nextn_predict_layers", minimum=0, default=0)
    draft = None
    if blocks:
        experts = fields.integer("n_routed_experts")
        draft = DraftShape(blocks, experts, fields.integer("num_experts_per_tok"), rows=blocks)
    dense = fields.integer("first_k_dense_replace", minimum=0, default=0)
    width = fields.integer("intermediate_size") if dense else 0
    shape = _with_experts(fields, side, draft=draft, dense_layers=dense, dense_width=width)
    fields.finish()
    return shape


def _with_experts(fields: _Fields, side: AttentionSide, **rest: Any) -> ModelShape:
    return ModelShape(
        side=side,
        vocab_size=fields.integer("vocab_size"),
        quantisation=_quantisation(fields),
        experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        shared_experts=fields.integer("n_shared_experts"),
        expert_width=fields.integer("moe_intermediate_size"),
        **rest,
    )


class _Fields(ConfigFields):
    """Those of a config of which others read other keys."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        super().__init__(config, name)
        self.ignore(tuple(config))


def _quantisation(fields: ConfigFields) -> Quantisation:
    config = fields.get("quantization_config")
    experts = fields.get("expert_dtype")
    if config is None:
        return Quantisation(WeightFormat.BF16, WeightFormat.BF16)
    block = config.get("weight_block_size") if isinstance(config, Mapping) else None
    if not isinstance(block, list) or len(block) != 2 or config.get("quant_method") != "fp8":
        fields.problem("quantization_config must be of fp8 with a weight_block_size")
        block = [128, 128]
    if experts not in (None, *_EXPERT_FORMATS):
        fields.problem(f"expert_dtype is {experts!r}; only 'fp4' and 'fp8' are handled")
    # V3.2 says ue8m0 of its activations and keeps fp32 scales beside its weights.
    bytes_of_scales = experts is not None and config.get("scale_fmt") == "ue8m0"
    return Quantisation(
        linear=WeightFormat.FP8_BLOCK,
        experts=_EXPERT_FORMATS.get(experts or "fp8", WeightFormat.FP8_BLOCK),
        fp8_block=(block[0], block[1]),
        fp8_scale_dtype=DType.F8_E8M0 if bytes_of_scales else DType.F32,
    )
