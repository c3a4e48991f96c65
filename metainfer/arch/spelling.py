"""Brings the vendor's inference config and transformers' config to the released spelling."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from metainfer.core.errors import CheckpointError

Put = Callable[[str, Any, str], None]  # (released key, value, key as the file spells it)

# Other names of the same key: the vendor's inference code first, then transformers.
_SAME = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "route_scale": "routed_scaling_factor",
    "score_func": "scoring_func",
    "n_hash_layers": "num_hash_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "norm_eps": "rms_norm_eps",
    "num_local_experts": "n_routed_experts",
}

_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def released_spelling(
    config: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Config with released key names, and released key -> the key as the file spells it.

    Raises:
        CheckpointError: one value is given twice, in two spellings, and the two differ.
    """
    out: dict[str, Any] = {}
    spelled: dict[str, str] = {}

    def put(key: str, value: Any, source: str) -> None:
        if key in out and out[key] != value:
            raise CheckpointError(
                f"the config of {name} gives {spelled[key]} as {out[key]!r} "
                f"and {source} as {value!r}, which mean the same thing",
                hint="remove one of the two keys",
            )
        out[key] = value
        spelled[key] = source

    for key, value in config.items():
        put(_SAME.get(key, key), value, key)
    if "dim" in config:
        _from_inference(out, put)
    if "layer_types" in config or "rope_parameters" in config:
        _from_transformers(out, put, name)
    return out, {key: source for key, source in spelled.items() if key != source}


def _from_inference(out: dict[str, Any], put: Put) -> None:
    """The inference config keeps YaRN and quantisation flat, and is a file beside config.json."""
    factor = out.pop("rope_factor", None)
    original = out.pop("original_seq_len", None)
    betas: dict[str, Any] = {key: out.pop(key) for key in ("beta_fast", "beta_slow") if key in out}
    if factor is not None and original:
        scaling: dict[str, Any] = {"type": "yarn", "factor": factor, **betas}
        scaling["original_max_position_embeddings"] = original
        put("rope_scaling", scaling, "rope_factor")
        if type(factor) is int and type(original) is int and "max_position_embeddings" not in out:
            put("max_position_embeddings", factor * original, "original_seq_len")
    # `dtype` defaults to fp8 in the vendor's ModelArgs, its scales to e8m0.
    dtype = out.pop("dtype", "fp8")
    scale_fmt = out.pop("scale_fmt", "ue8m0")
    scale_dtype = out.pop("scale_dtype", "fp8")
    if dtype == "fp8":
        quantisation = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        if scale_dtype == "fp8":
            quantisation["scale_fmt"] = scale_fmt or "ue8m0"
        put("quantization_config", quantisation, "dtype")
    else:
        put("torch_dtype", "bfloat16" if dtype == "bf16" else dtype, "dtype")


def _from_transformers(out: dict[str, Any], put: Put, name: str) -> None:
    """transformers names layers by type, and nests the two rotary embeddings."""
    rates = {**_RATIO_OF_LAYER_TYPE, **_object(out, "compress_rates", name)}
    layer_types = _names(out, "layer_types", name)
    if layer_types is not None:
        put("compress_ratios", [rates.get(kind, kind) for kind in layer_types], "layer_types")
    routers = _names(out, "mlp_layer_types", name)
    if routers is not None:
        num_hash = sum(kind == "hash_moe" for kind in routers)
        expected = ["hash_moe"] * num_hash + ["moe"] * (len(routers) - num_hash)
        if routers == expected:
            put("num_hash_layers", num_hash, "mlp_layer_types")
        else:
            out["mlp_layer_types"] = routers  # not a prefix of hash layers: refused as unknown
    partial = out.pop("partial_rotary_factor", None)
    if partial is not None and "head_dim" in out:
        head_dim = out["head_dim"]
        if type(partial) not in (int, float) or not 0 < partial <= 1:
            raise _refused("partial_rotary_factor", partial, "a number above 0 and at most 1", name)
        if type(head_dim) is int:  # if not, it is refused when it is read
            put("qk_rope_head_dim", round(partial * head_dim), "partial_rotary_factor")
    rope = _object(out, "rope_parameters", name)
    nested = "main" in rope or "compress" in rope
    main = _object(rope, "main", name, "rope_parameters.main")
    compress = _object(rope, "compress", name, "rope_parameters.compress") if nested else rope
    for theta, part, where in (
        ("rope_theta", main, "rope_parameters.main"),
        ("compress_rope_theta", compress, "rope_parameters.compress"),
    ):
        part.pop("partial_rotary_factor", None)
        if nested and "rope_theta" in part:
            put(theta, part.pop("rope_theta"), f"{where}.rope_theta")
    if main.get("rope_type", "default") != "default" or main.keys() - {"rope_type"}:
        out["rope_parameters.main"] = main  # only a plain embedding is handled: refused as unknown
    if compress.keys() - {"rope_type"} or compress.get("rope_type", "default") != "default":
        put("rope_scaling", compress, "rope_parameters.compress")
    # transformers counts no drafting blocks: it never instantiates them.
    if layer_types is not None and len(layer_types) == out.get("num_hidden_layers"):
        out.pop("num_nextn_predict_layers", None)


def _object(
    values: dict[str, Any], key: str, name: str, spelled: str | None = None
) -> dict[str, Any]:
    """Take an optional object out of `values`; a copy, empty where it is absent or null."""
    value = values.pop(key, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refused(spelled or key, value, "an object", name)
    return dict(value)


def _names(values: dict[str, Any], key: str, name: str) -> list[str] | None:
    """Take an optional list of strings out of `values`; None where it is absent or null."""
    value = values.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise _refused(key, value, "a list of strings", name)
    return list(value)


def _refused(key: str, value: Any, must_be: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"the config of {name} gives {key} as {reprlib.repr(value)}; it must be {must_be}",
        hint="use the config.json as the vendor ships it",
    )
