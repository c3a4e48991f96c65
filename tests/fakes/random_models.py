"""Random miniatures for model tests: written once a session, and read by whoever needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from metainfer.arch.families import arch_from_config
from metainfer.arch.record import Arch
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
