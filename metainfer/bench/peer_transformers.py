"""The same checkpoint in the `transformers` package: the peer to measure against, and the oracle.

Owns the map from released tensor names to those of `DeepseekV4ForCausalLM`. Weights are dequantised
one by one into the dtype that transformers itself would load them in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from metainfer.arch.families import config_of
from metainfer.arch.manifest import MTP_PREFIX
from metainfer.weights.load import Checkpoint

_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attn": "self_attn",
        "wq_a": "q_a_proj",
        "q_norm": "q_a_norm",
        "wq_b": "q_b_proj",
        "wkv": "kv_proj",
        "wgate": "gate_proj",
        "ape": "position_bias",
        "wo_a": "o_a_proj",
        "wo_b": "o_b_proj",
        "attn_sink": "sinks",
        "weights_proj": "scorer.weights_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn": "mlp",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }
)
_OUTSIDE_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
        "hc_head_fn": "model.hc_head.hc_fn",
        "hc_head_base": "model.hc_head.hc_base",
        "hc_head_scale": "model.hc_head.hc_scale",
    }
)
_HYPER_CONNECTION = re.compile(r"hc_(attn|ffn)_(fn|base|scale)")
_EXPERT = re.compile(r"(layers\.\d+\.ffn\.experts)\.\d+\.")


def peer_name(name: str) -> str:
    """What transformers calls the tensor `name` of a released checkpoint (not of an expert)."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    layers, number, *parts = name.split(".")
    if match := _HYPER_CONNECTION.fullmatch(parts[0]):
        return f"model.{layers}.{number}.{match[1]}_hc.{match[2]}"
    if parts[:3] == ["attn", "indexer", "compressor"]:
        parts[1:3] = ["compressor", "indexer"]
    elif parts[:2] == ["attn", "indexer"]:
        parts[1:2] = ["compressor", "indexer"]
    if parts == ["ffn", "gate", "bias"]:
        parts[2] = "e_score_correction_bias"
    if "compressor" in parts and parts[-2:] == ["norm", "weight"]:
        parts[-2] = "kv_norm"
    return ".".join(["model", layers, number, *(_PARTS.get(part, part) for part in parts)])


def peer_state(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in transformers, tensor) of everything it loads: matrices that are quantised in
    `dtype`, other numbers in fp32, and integers."""
    experts_done = set()
    for name in checkpoint.index.entries:
        if name.startswith(MTP_PREFIX) or name.endswith(".scale"):
            continue
        if match := _EXPERT.match(name):
            if match[1] not in experts_done:
                experts_done.add(match[1])
                yield from _expert_state(checkpoint, match[1], dtype)
            continue
        prefix = name.removesuffix(".weight")
        if f"{prefix}.scale" in checkpoint.index.entries:
            yield peer_name(name), checkpoint.weight(prefix).dequantise(dtype)
        else:
            tensor = checkpoint.tensor(name)
            yield peer_name(name), tensor.float() if tensor.is_floating_point() else tensor


def load_peer(
    model: str | Path,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """`DeepseekV4ForCausalLM` with the checkpoint's weights, ready to run without gradients.

    Matrices are in `dtype`; what transformers keeps in fp32 whatever is asked for stays so.

    Args:
        model, overrides: where the config is, as `arch.families.read_arch` takes them.
    """
    values = config_of(model, overrides)
    # The weights come dequantised: transformers must not set up its own quantised layers.
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(**values)
    with torch.device(device):
        peer = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    always_fp32 = set(peer._keep_in_fp32_modules_strict or ())
    targets = set(peer.state_dict())
    for name, tensor in peer_state(checkpoint, dtype):
        wanted = torch.float32 if always_fp32.intersection(name.split(".")) else dtype
        converted = tensor.to(wanted) if tensor.is_floating_point() else tensor
        _replace(peer, name, converted.to(device))
        targets.remove(name)
    if targets:
        raise ValueError(f"the checkpoint has nothing for {', '.join(sorted(targets))}")
    return peer.eval().requires_grad_(False)


class PeerSession:
    """A batch of equally long sequences in transformers, with its cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        # transformers renamed the argument in 5.24.
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_word = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def step(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        """Run the tokens [B, T] (int64) and return the logits after the last ones, [B, V]."""
        output = self._model(
            input_ids=token_ids_BT,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_word: self._cache},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after one prompt."""
        device = self._model.device
        ids = [int(self.step(torch.tensor([list(prompt)], device=device)).argmax(-1))]
        while len(ids) < count:
            ids.append(int(self.step(torch.tensor([[ids[-1]]], device=device)).argmax(-1)))
        return ids


def _expert_state(
    checkpoint: Checkpoint, prefix: str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    ids = range(checkpoint.arch.num_experts)
    device = checkpoint.tensor(f"{prefix}.0.w1.weight").device
    w1, w2, w3 = (w.dequantise(dtype) for w in checkpoint.experts(prefix, ids, device))
    target = f"model.{prefix.replace('.ffn.', '.mlp.')}"
    yield f"{target}.gate_up_proj", torch.cat([w1, w3], dim=1)  # [E, 2 I, D]
    yield f"{target}.down_proj", w2  # [E, D, I]


def _replace(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Put `tensor` where the parameter or buffer `name` is, after checking its shape."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, leaf)
    if old.shape != tensor.shape:
        raise ValueError(
            f"{name}: {tuple(tensor.shape)} in the checkpoint, {tuple(old.shape)} here"
        )
    if leaf in module._parameters:
        module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor
