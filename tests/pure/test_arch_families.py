"""Reading configs: the three spellings, known names, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.deepseek_v4 import vendor_config
from metainfer.arch.families import arch_from_config, known_names, read_arch
from metainfer.arch.manifest import total_bytes
from metainfer.arch.record import LayerKind, RouterKind, WeightFormat, YarnScaling
from metainfer.arch.tiny import tiny_arch, tiny_config, tiny_quantised_arch, tiny_quantised_config
from metainfer.core.dtypes import DType
from metainfer.core.errors import CheckpointError, UserError


def inference_config() -> dict[str, Any]:
    """V4-Flash in the vendor's inference spelling (its inference/config.json)."""
    return {
        "vocab_size": 129280,
        "dim": 4096,
        "moe_inter_dim": 2048,
        "n_layers": 43,
        "n_hash_layers": 3,
        "n_heads": 64,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_activated_experts": 6,
        "score_func": "sqrtsoftplus",
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "q_lora_rank": 1024,
        "head_dim": 512,
        "rope_head_dim": 64,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "window_size": 128,
        "original_seq_len": 65536,
        "rope_theta": 10000,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    }


def transformers_config() -> dict[str, Any]:
    """`tiny_config` as transformers 5.24 writes it."""
    config = tiny_config(compress_ratios=None, num_hash_layers=None, rope_scaling=None)
    config["dtype"] = config.pop("torch_dtype")
    sliding, sparse, heavy = (
        f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed")
    )
    return config | {
        "num_nextn_predict_layers": 1,
        "layer_types": [sliding, sliding, sparse, heavy, sparse],
        "compress_rates": {sparse: 4, heavy: 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000,
                "partial_rotary_factor": 0.25,
                "factor": 16,
                "original_max_position_embeddings": 256,
                "beta_fast": 32,
                "beta_slow": 1,
                "attention_factor": 1.0,
            },
        },
        "transformers_version": "5.24.0",
        "router_jitter_noise": 0.0,
    }


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        arch_from_config(config, "some-model")
    return caught.value.message


def test_v4_flash() -> None:
    arch = read_arch("deepseek-v4-flash")
    assert arch.name == "deepseek-v4-flash"
    kinds = [layer.kind for layer in arch.layers]
    assert arch.num_layers == 43
    assert kinds.count(LayerKind.SLIDING) == 2
    assert kinds.count(LayerKind.COMPRESSED_SPARSE) == 21
    assert kinds.count(LayerKind.HEAVILY_COMPRESSED) == 20
    assert [layer.router for layer in arch.layers[:4]] == [RouterKind.HASH] * 3 + [
        RouterKind.LEARNED
    ]
    assert arch.quantisation.linear is WeightFormat.FP8_BLOCK
    assert arch.quantisation.experts is WeightFormat.FP4_GROUP
    assert arch.quantisation.fp8_scale_dtype is DType.F8_E8M0
    assert arch.yarn == YarnScaling(16.0, 65536, 32.0, 1.0)
    assert (arch.max_model_len, arch.num_mtp_layers, arch.eos_token_ids) == (2**20, 1, (1,))


def test_inference_names_mean_the_same() -> None:
    arch = arch_from_config(inference_config(), "deepseek-v4-flash")
    assert arch == read_arch("deepseek-v4-flash")


def test_transformers_names_mean_the_same() -> None:
    assert arch_from_config(transformers_config(), "tiny") == tiny_arch()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert_dtype": "fp8"},
        {"rope_scaling": None, "eos_token_id": [1, 2]},
        {"num_nextn_predict_layers": 2, "compress_ratios": [0, 0, 4, 128, 4, 0, 0]},
    ],
)
def test_vendor_config_is_read_back(changes: dict[str, Any]) -> None:
    arch = tiny_quantised_arch(**changes)
    assert arch_from_config(vendor_config(arch), arch.name) == arch
    plain = tiny_arch(torch_dtype="bfloat16")
    assert arch_from_config(vendor_config(plain), plain.name) == plain


def test_paths(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    assert read_arch(directory).name == "my-model"
    assert read_arch(str(directory / "config.json")).name == "my-model"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tiny_config()))
    assert read_arch(other).name == "other"


def test_pebble_is_known() -> None:
    assert {"pebble", "deepseek-v4-flash"} <= set(known_names())
    arch = read_arch("pebble")
    assert arch.name == "pebble"
    assert {layer.kind for layer in arch.layers} == set(LayerKind)


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(UserError, match="there is no model at"):
        read_arch("once upon a time " * 1000)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-model") as caught:
        read_arch("no-such-model")
    assert "deepseek-v4-flash" in (caught.value.hint or "")
    with pytest.raises(CheckpointError, match="no config.json"):
        read_arch(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "[" * 100_000, "\udcff"])
def test_config_that_is_not_a_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="config.json"):
        read_arch(path)


def test_all_missing_keys_at_once() -> None:
    config = tiny_config(hidden_size=None, index_topk=None, compress_ratios=None)
    message = refusal(config)
    assert "missing keys: compress_ratios, hidden_size, index_topk" in message
    renamed = inference_config()
    del renamed["route_scale"]
    assert "missing keys: routed_scaling_factor" in refusal(renamed)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"n_group": 8}, "n_group"),
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "[64]"),
        ({"compress_ratios": [0, 0, 4, 128]}, "has 4 entries; 5"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 0]}, "has 6 entries; 5"),
        ({"compress_ratios": []}, "has 0 entries; 5"),
        ({"compress_ratios": "0,0,4"}, "list of integers"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1; it must be"),
        ({"num_hash_layers": 6}, "num_hash_layers is 6"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": 64,
                    "mscale": 0.7,
                }
            },
            "rope_scaling.mscale",
        ),
        ({"torch_dtype": "float16"}, "torch_dtype is 'float16'"),
        ({"torch_dtype": None}, "torch_dtype is None"),
        ({"expert_dtype": "fp8"}, "expert_dtype"),
        ({"o_groups": 3}, "num_attention_heads over o_groups: 8 is not a multiple of 3"),
        ({"qk_rope_head_dim": 64}, "more than head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok (9)"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "it must be a positive number"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"eos_token_id": 600}, "eos_token_id 600"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"kv_lora_rank": 512, "attn_bias": True}, "attn_bias, kv_lora_rank"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
    ],
)
def test_refused_values_are_named(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tiny_config() | {"torch_dtype": "float32"} | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weight_block_size": [32, 32]}, "weight_block_size is [32, 32]"),
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"scale_fmt": "float"}, "scale_fmt"),
        ({"modules_to_not_convert": ["x"]}, "modules_to_not_convert"),
    ],
)
def test_refused_quantisation_is_named(changes: dict[str, Any], expected: str) -> None:
    config = tiny_quantised_config()
    config["quantization_config"] |= changes
    assert expected in refusal(config)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v41", None, 3])
def test_other_families_are_refused(model_type: Any) -> None:
    assert "model_type" in refusal(tiny_config() | {"model_type": model_type})


def test_widths_that_the_formats_cannot_cut() -> None:
    assert "o_lora_rank" in refusal(tiny_quantised_config(o_lora_rank=64))
    message = refusal(tiny_quantised_config(moe_intermediate_size=136))
    assert "moe_intermediate_size over an fp4 group: 136 is not a multiple of 32" in message


def test_ratios_may_leave_out_the_mtp_block() -> None:
    short = tiny_quantised_arch(compress_ratios=[0, 0, 4, 128, 4])
    assert short == tiny_quantised_arch()
    assert short.num_mtp_layers == 1


def test_scale_formats() -> None:
    assert tiny_quantised_arch().quantisation.fp8_scale_dtype is DType.F8_E8M0
    config = tiny_quantised_config(expert_dtype="fp8")
    del config["quantization_config"]["scale_fmt"]
    quantisation = arch_from_config(config, "base").quantisation
    assert quantisation.fp8_scale_dtype is DType.F32
    assert quantisation.experts is WeightFormat.FP8_BLOCK
    plain = tiny_arch(torch_dtype="bfloat16", expert_dtype="fp4").quantisation
    assert (plain.linear, plain.experts) == (WeightFormat.BF16, WeightFormat.FP4_GROUP)


def test_dspark_stages_are_recognised() -> None:
    arch = tiny_quantised_arch(
        compress_ratios=[0, 0, 4, 128, 4, 0, 0, 0],
        dspark_block_size=5,
        dspark_noise_token_id=500,
        dspark_target_layer_ids=[2, 3, 4],
        dspark_markov_rank=32,
    )
    assert (arch.num_dspark_stages, arch.num_mtp_layers, arch.num_layers) == (3, 0, 5)


def test_one_value_in_two_spellings() -> None:
    config = tiny_config()
    assert arch_from_config(config | {"n_heads": 8}, "tiny") == tiny_arch()
    message = refusal(config | {"n_heads": 16})
    assert "num_attention_heads as 8" in message
    assert "n_heads as 16" in message


@pytest.mark.parametrize(
    ("part", "changes", "expected"),
    [
        ("main", {"rope_type": "yarn", "factor": 2}, "rope_parameters.main"),
        ("compress", {"rope_type": "linear"}, "rope_parameters.compress.type is 'linear'"),
        ("compress", {"attention_factor": 1.3}, "rope_parameters.compress.attention_factor"),
    ],
)
def test_refused_rope_parameters(part: str, changes: dict[str, Any], expected: str) -> None:
    config = transformers_config()
    config["rope_parameters"][part] |= changes
    assert expected in refusal(config)


def test_hash_layers_must_come_first() -> None:
    config = transformers_config() | {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}
    assert "mlp_layer_types" in refusal(config)


ODD_VALUES: tuple[Any, ...] = (
    None,
    "x",
    -1,
    True,
    1.5,
    float("inf"),
    float("nan"),
    10**30,
    [],
    [[]],
    ["x"],
    {},
    {"type": []},
    {"main": 5},
    {"main": {"rope_theta": "x"}, "compress": {}},
)


@pytest.mark.parametrize(
    "config",
    [tiny_config(), tiny_quantised_config(), inference_config(), transformers_config()],
    ids=["released", "quantised", "inference", "transformers"],
)
def test_any_value_of_any_key_is_read_or_refused(config: dict[str, Any]) -> None:
    """Nothing but a CheckpointError comes out, and what is read can be listed."""
    places = [(config, key) for key in config]
    nested = ("rope_scaling", "quantization_config", "rope_parameters", "compress_rates")
    places += [(config[key], inner) for key in nested for inner in config.get(key) or {}]
    refused = 0
    for where, key in places:
        before = where[key]
        for value in ODD_VALUES:
            where[key] = value
            try:
                arch = arch_from_config(config, "odd")
            except CheckpointError:
                refused += 1
            else:
                assert total_bytes(arch) > 0
        where[key] = before
    assert refused > 5 * len(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_routed_experts": 10**9}, "n_routed_experts is 1000000000; at most 4096 are handled"),
        ({"num_nextn_predict_layers": 10**9}, "1000000000 drafting blocks for 5 layers"),
    ],
)
def test_counts_that_would_list_tensors_without_end(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tiny_config(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": 3}, "layer_types as 3; it must be a list of strings"),
        ({"compress_rates": [4]}, "compress_rates as [4]; it must be an object"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor as 2; it must be a number above 0"),
        ({"rope_parameters": {"main": 1}}, "rope_parameters.main as 1; it must be an object"),
    ],
)
def test_malformed_keys_of_transformers_are_named(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal({**transformers_config(), **changes})
