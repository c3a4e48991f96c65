"""DeepSeek-V4: from config.json to Arch and back.

Three spellings are read: the released config.json, the vendor's own inference config (dim,
n_layers, ...), and the one that transformers writes (layer_types, rope_parameters). All are brought
to the released spelling first. Source of keys and values: the released configs of V4-Flash and the
`ModelArgs` of the vendor's inference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from metainfer.arch.config_fields import ConfigFields
from metainfer.arch.record import (
    Arch,
    LayerArch,
    LayerKind,
    Quantisation,
    RouterKind,
    WeightFormat,
    YarnScaling,
)
from metainfer.core.dtypes import DType

FAMILY = "deepseek_v4"

_KIND_OF_RATIO = {
    0: LayerKind.SLIDING,
    4: LayerKind.COMPRESSED_SPARSE,
    128: LayerKind.HEAVILY_COMPRESSED,
}

# Keys of which one value alone is handled; it is also what their absence means.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "first_k_dense_replace": (None, 0),
    "moe_layer_freq": (None, 1),
}

# Keys that cannot change what a forward pass computes.
# fmt: off
_HARMLESS = (
    "architectures", "model_type", "transformers_version", "auto_map", "_name_or_path",
    "torch_dtype", "dtype", "initializer_range", "use_cache", "attention_dropout", "pad_token_id",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha",
    "seq_aux", "ep_size", "pretraining_tp", "max_batch_size", "max_seq_len", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder",
    "id2label", "label2id", "problem_type", "_attn_implementation",
)
# fmt: on

# No model of this class has more. A config that says so would have the manifest list tensors until
# memory ends.
_MOST_EXPERTS = 4096

# The drafter of the DSpark revision: recognised, its tensors (mtp.*) are not used.
_DSPARK = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
)

_PLAIN_FORMATS = {"float32": WeightFormat.F32, "bfloat16": WeightFormat.BF16}

_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def parse(config: Mapping[str, Any], spelled: Mapping[str, str], name: str) -> Arch:
    """The Arch of a config in the released spelling (see `spelling.released_spelling`).

    Raises:
        CheckpointError: naming every missing key, unhandled value and unknown key at once.
    """
    fields = ConfigFields(config, name, spelled)
    for key, allowed in _EXPECTED.items():
        fields.expect(key, allowed)
    fields.ignore(_HARMLESS)
    dspark = any(fields.has(key) for key in _DSPARK)
    fields.ignore(_DSPARK)

    layers, num_extra_layers = _layers(fields, dspark)
    yarn = _yarn(fields)
    arch = Arch(
        family=FAMILY,
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        num_heads=fields.integer("num_attention_heads"),
        head_dim=fields.integer("head_dim"),
        rope_head_dim=fields.integer("qk_rope_head_dim", minimum=2),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window"),
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        num_shared_experts=1,
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        norm_topk_prob=True,
        swiglu_limit=fields.number("swiglu_limit"),
        index_num_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        hc_mult=fields.integer("hc_mult"),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters"),
        hc_eps=fields.number("hc_eps", default=1e-6),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=fields.number("rope_theta"),
        compress_rope_theta=fields.number("compress_rope_theta"),
        yarn=yarn,
        max_model_len=fields.integer("max_position_embeddings", minimum=2),
        bos_token_id=fields.integer("bos_token_id", minimum=0, default=0),
        eos_token_ids=_eos(fields),
        quantisation=_quantisation(fields),
        num_mtp_layers=0 if dspark else num_extra_layers,
        num_dspark_stages=num_extra_layers if dspark else 0,
    )
    if fields.complete:
        _check_divisions(fields, arch)
    fields.finish()
    return arch


def vendor_config(arch: Arch) -> dict[str, Any]:
    """The config.json of `arch` in the released spelling; `parse` of it gives `arch` again."""
    quantisation = arch.quantisation
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": FAMILY,
        "torch_dtype": "float32" if quantisation.linear is WeightFormat.F32 else "bfloat16",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": 1,
        "head_dim": arch.head_dim,
        "qk_rope_head_dim": arch.rope_head_dim,
        "q_lora_rank": arch.q_lora_rank,
        "o_groups": arch.o_groups,
        "o_lora_rank": arch.o_lora_rank,
        "sliding_window": arch.sliding_window,
        "compress_ratios": [layer.ratio for layer in arch.layers]
        + [0] * (arch.num_mtp_layers + arch.num_dspark_stages),
        "num_hash_layers": sum(layer.router is RouterKind.HASH for layer in arch.layers),
        "num_nextn_predict_layers": arch.num_mtp_layers,
        "n_routed_experts": arch.num_experts,
        "num_experts_per_tok": arch.experts_per_token,
        "n_shared_experts": arch.num_shared_experts,
        "moe_intermediate_size": arch.moe_intermediate_size,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": arch.norm_topk_prob,
        "routed_scaling_factor": arch.routed_scaling_factor,
        "swiglu_limit": arch.swiglu_limit,
        "hidden_act": "silu",
        "index_n_heads": arch.index_num_heads,
        "index_head_dim": arch.index_head_dim,
        "index_topk": arch.index_topk,
        "hc_mult": arch.hc_mult,
        "hc_sinkhorn_iters": arch.hc_sinkhorn_iters,
        "hc_eps": arch.hc_eps,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope_theta,
        "compress_rope_theta": arch.compress_rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": arch.max_model_len,
        "bos_token_id": arch.bos_token_id,
        "eos_token_id": arch.eos_token_ids[0]
        if len(arch.eos_token_ids) == 1
        else list(arch.eos_token_ids),
        "tie_word_embeddings": False,
    }
    if arch.yarn is not None:
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": arch.yarn.factor,
            "original_max_position_embeddings": arch.yarn.original_max_position,
            "beta_fast": arch.yarn.beta_fast,
            "beta_slow": arch.yarn.beta_slow,
        }
    if quantisation.linear is WeightFormat.FP8_BLOCK:
        config["quantization_config"] = dict(_FP8_CONFIG)
        if quantisation.fp8_scale_dtype is DType.F8_E8M0:
            config["quantization_config"]["scale_fmt"] = "ue8m0"
        config["expert_dtype"] = "fp4" if quantisation.experts is WeightFormat.FP4_GROUP else "fp8"
    elif quantisation.experts is WeightFormat.FP4_GROUP:
        config["expert_dtype"] = "fp4"
    if arch.num_dspark_stages:
        config["dspark_target_layer_ids"] = []
    return config


def _layers(fields: ConfigFields, dspark: bool) -> tuple[tuple[LayerArch, ...], int]:
    """The decoder layers, and the number of drafting blocks that follow them."""
    num_layers = fields.integer("num_hidden_layers")
    num_hash_layers = fields.integer("num_hash_layers", minimum=0)
    ratios = fields.integers("compress_ratios")
    key = fields.spell("compress_ratios")
    surplus = max(0, len(ratios) - num_layers)
    num_extra = surplus
    if not dspark:
        num_extra = fields.integer("num_nextn_predict_layers", minimum=0, default=surplus)
    else:
        fields.ignore(["num_nextn_predict_layers"])
    if num_extra > num_layers:
        fields.problem(f"there are {num_extra} drafting blocks for {num_layers} layers")
    given = bool(ratios) or fields.get("compress_ratios") == []
    if given and len(ratios) not in (num_layers, num_layers + num_extra):
        expected = f"{num_layers}" + (f" or {num_layers + num_extra}" if num_extra else "")
        fields.problem(f"{key} has {len(ratios)} entries; {expected} are expected")
    unhandled = sorted(set(ratios[:num_layers]) - _KIND_OF_RATIO.keys())
    if unhandled:
        fields.problem(f"{key} has the ratios {unhandled}; only 0, 4 and 128 are handled")
    if any(ratios[num_layers:]):
        fields.problem(f"{key} gives a drafting block a ratio; only 0 is handled there")
    if num_hash_layers > num_layers:
        fields.problem(
            f"{fields.spell('num_hash_layers')} is {num_hash_layers}, "
            f"more than the {num_layers} layers"
        )
    layers = tuple(
        LayerArch(
            index=index,
            kind=_KIND_OF_RATIO.get(ratio, LayerKind.SLIDING),
            ratio=ratio,
            router=RouterKind.HASH if index < num_hash_layers else RouterKind.LEARNED,
        )
        for index, ratio in enumerate(ratios[:num_layers])
    )
    return layers, num_extra


def _yarn(fields: ConfigFields) -> YarnScaling | None:
    scaling = fields.get("rope_scaling")
    if scaling is None:
        return None
    key = fields.spell("rope_scaling")
    if not isinstance(scaling, Mapping):
        fields.problem(f"{key} must be an object or null")
        return None
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        fields.problem(f"{key}.type is {kind!r}; only 'yarn' is handled")
        return None
    # V4 scales neither scores nor cos/sin: mscale and attention_factor must be neutral.
    neutral = {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1, "truncate": True}
    known = {"type", "rope_type", "factor", "original_max_position_embeddings"}
    known |= {"beta_fast", "beta_slow"}
    for inner, value in scaling.items():
        if inner not in known and neutral.get(inner) != value:
            fields.problem(f"{key}.{inner} is {value!r}, which is not handled")
    numbers = {"factor": None, "original_max_position_embeddings": None}
    values = {**numbers, "beta_fast": 32, "beta_slow": 1, **scaling}
    for inner in (*numbers, "beta_fast", "beta_slow"):
        if type(values[inner]) not in (int, float) or not 0 < values[inner] < math.inf:
            fields.problem(f"{key}.{inner} is {values[inner]!r}; it must be a positive number")
            return None
    return YarnScaling(
        factor=float(values["factor"]),
        original_max_position=int(values["original_max_position_embeddings"]),
        beta_fast=float(values["beta_fast"]),
        beta_slow=float(values["beta_slow"]),
    )


def _quantisation(fields: ConfigFields) -> Quantisation:
    torch_dtype = fields.get("torch_dtype", fields.get("dtype"))
    config = fields.get("quantization_config")
    expert_dtype = fields.get("expert_dtype")
    if config is None:
        plain = _PLAIN_FORMATS.get(torch_dtype) if isinstance(torch_dtype, str) else None
        if plain is None:
            key = fields.spell("torch_dtype")
            fields.problem(
                f"{key} is {torch_dtype!r} and there is no quantization_config; "
                "only 'bfloat16' and 'float32' are handled"
            )
            plain = WeightFormat.BF16
        if expert_dtype not in (None, "fp4"):
            fields.problem(
                f"{fields.spell('expert_dtype')} is {expert_dtype!r} "
                "and there is no quantization_config; only 'fp4' is handled there"
            )
        experts = WeightFormat.FP4_GROUP if expert_dtype == "fp4" else plain
        return Quantisation(linear=plain, experts=experts)

    key = fields.spell("quantization_config")
    if not isinstance(config, Mapping):
        fields.problem(f"{key} must be an object or null")
        config = {}
    for inner, handled in _FP8_CONFIG.items():
        value = config.get(inner, handled if inner == "fmt" else None)
        if value != handled:
            fields.problem(f"{key}.{inner} is {value!r}; only {handled!r} is handled")
    unknown = sorted(config.keys() - _FP8_CONFIG.keys() - {"scale_fmt", "expert_dtype"})
    if unknown:
        fields.problem(f"{key} has keys that metainfer does not know: {', '.join(unknown)}")
    scale_fmt = config.get("scale_fmt")
    if scale_fmt not in (None, "ue8m0"):
        fields.problem(f"{key}.scale_fmt is {scale_fmt!r}; only 'ue8m0' or none is handled")
    expert_dtype = config.get("expert_dtype", expert_dtype)
    if expert_dtype not in (None, "fp4", "fp8"):
        fields.problem(
            f"{fields.spell('expert_dtype')} is {expert_dtype!r}; only 'fp4' and 'fp8' are handled"
        )
    return Quantisation(
        linear=WeightFormat.FP8_BLOCK,
        experts=WeightFormat.FP4_GROUP if expert_dtype == "fp4" else WeightFormat.FP8_BLOCK,
        fp8_scale_dtype=DType.F8_E8M0 if scale_fmt == "ue8m0" else DType.F32,
    )


def _eos(fields: ConfigFields) -> tuple[int, ...]:
    value = fields.get("eos_token_id", 1)
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not ids or any(type(item) is not int or item < 0 for item in ids):
        fields.problem(
            f"{fields.spell('eos_token_id')} is {value!r}; it must be a token id or a list"
        )
        return (1,)
    return ids


def _check_divisions(fields: ConfigFields, arch: Arch) -> None:
    """Relations between widths that the forward pass and the formats rely on."""

    def divides(whole: int, part: int, what: str) -> None:
        if whole % part:
            fields.problem(f"{what}: {whole} is not a multiple of {part}")

    heads, groups = fields.spell("num_attention_heads"), fields.spell("o_groups")
    divides(arch.num_heads, arch.o_groups, f"{heads} over {groups}")
    rope = fields.spell("qk_rope_head_dim")
    divides(arch.rope_head_dim, 2, rope)
    for width, key in ((arch.head_dim, "head_dim"), (arch.index_head_dim, "index_head_dim")):
        if arch.rope_head_dim > width:
            fields.problem(f"{rope} ({arch.rope_head_dim}) is more than {key} ({width})")
    if arch.num_experts > _MOST_EXPERTS:
        fields.problem(
            f"{fields.spell('n_routed_experts')} is {arch.num_experts}; "
            f"at most {_MOST_EXPERTS} are handled"
        )
    if arch.experts_per_token > arch.num_experts:
        fields.problem(
            f"{fields.spell('num_experts_per_tok')} ({arch.experts_per_token}) is more than "
            f"n_routed_experts ({arch.num_experts})"
        )
    for key, ids in (("bos_token_id", (arch.bos_token_id,)), ("eos_token_id", arch.eos_token_ids)):
        if max(ids) >= arch.vocab_size > 1:
            fields.problem(f"{key} {max(ids)} lies outside vocab_size {arch.vocab_size}")
    quantisation = arch.quantisation
    if quantisation.linear is WeightFormat.FP8_BLOCK and arch.o_groups > 1:
        # Each group is a matrix of its own, so no block of scales may straddle two groups.
        rows = quantisation.fp8_block[0]
        divides(arch.o_lora_rank, rows, "o_lora_rank over the rows of an fp8 block")
    if quantisation.experts is WeightFormat.FP4_GROUP:
        for width, key in (
            (arch.hidden_size, "hidden_size"),
            (arch.moe_intermediate_size, "moe_intermediate_size"),
        ):
            divides(width, quantisation.fp4_group, f"{fields.spell(key)} over an fp4 group")
