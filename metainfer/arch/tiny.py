"""Miniatures for tests: every layer kind and both routers, in a model of a few hundred kilobytes.

64 index heads: with few heads the sum of ReLUs is often exactly 0, ties in the top-k are broken at
random, and two right implementations disagree.
"""

from __future__ import annotations

from typing import Any

from metainfer.arch.families import arch_from_config
from metainfer.arch.record import Arch


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Released-spelling config of a 5-layer fp32 model with small, uneven widths.

    `changes` replace keys; a value of None removes the key.
    """
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 4, 128, 4],
        "num_hash_layers": 1,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "index_n_heads": 64,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return _changed(config, changes)


def tiny_quantised_config(**changes: Any) -> dict[str, Any]:
    """As `tiny_config`, in the released formats (fp8 blocks, fp4 experts), with one MTP block;
    widths are multiples of 128."""
    config = tiny_config(
        torch_dtype="bfloat16",
        hidden_size=256,
        num_attention_heads=4,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_lora_rank=128,
        compress_ratios=[0, 0, 4, 128, 4, 0],
        num_nextn_predict_layers=1,
        moe_intermediate_size=128,
        index_head_dim=128,
        expert_dtype="fp4",
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    )
    return _changed(config, changes)


def tiny_arch(**changes: Any) -> Arch:
    """The Arch of `tiny_config(**changes)`."""
    return arch_from_config(tiny_config(**changes), "tiny")


def tiny_quantised_arch(**changes: Any) -> Arch:
    """The Arch of `tiny_quantised_config(**changes)`."""
    return arch_from_config(tiny_quantised_config(**changes), "tiny-quantised")


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not None}
