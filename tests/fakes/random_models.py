"""Random miniatures for model tests: written once a session, and read by whoever needs them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from metainfer.arch.families import arch_from_config
from metainfer.arch.manifest import iterate
from metainfer.arch.record import Arch
from metainfer.weights.index import SINGLE_NAME
from metainfer.weights.load import Checkpoint
from metainfer.weights.synth import write_checkpoint

# Small enough that clamps, epsilons and windows matter at the activations of a random model.
HARD = {"swiglu_limit": 0.7, "rms_norm_eps": 1e-3, "hc_eps": 1e-3}


@dataclass(frozen=True)
class RandomModel:
    """A checkpoint on disk and what it is."""

    directory: Path
    arch: Arch

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Random tokens of the model's vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.arch.vocab_size, (count,), generator=generator).tolist()


def random_model(directory: Path, config: dict[str, Any], seed: int = 0) -> RandomModel:
    """Writes a random checkpoint of `config`: every tensor is random, no one is constant."""
    write_checkpoint(directory, config, seed=seed)
    return RandomModel(directory, arch_from_config(config, "random"))


def layers(*ratios: int, hashed: int = 0) -> dict[str, Any]:
    """Config keys of a model with these layers, the first `hashed` of them routed by hash."""
    return {
        "compress_ratios": list(ratios),
        "num_hidden_layers": len(ratios),
        "num_hash_layers": hashed,
    }


def dequantised(model: RandomModel, directory: Path) -> RandomModel:
    """Writes the same numbers again as an fp32 checkpoint."""
    config = json.loads((model.directory / "config.json").read_text(encoding="utf-8"))
    for key in ("quantization_config", "expert_dtype"):
        config.pop(key, None)
    config["torch_dtype"] = "float32"
    arch = arch_from_config(config, "dequantised")
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with Checkpoint.open(model.directory, model.arch) as checkpoint:
        tensors = {spec.name: _number(checkpoint, spec.name) for spec in iterate(arch)}
    save_file(tensors, directory / SINGLE_NAME)
    return RandomModel(directory, arch)


def _number(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of `checkpoint` as fp32 numbers, or as the integers that it holds."""
    prefix = name.removesuffix(".weight")
    if f"{prefix}.scale" in checkpoint.index.entries:
        return checkpoint.weight(prefix).dequantise(torch.float32)
    tensor = checkpoint.tensor(name)
    return tensor.float() if tensor.is_floating_point() else tensor.clone()
