"""A whole checkpoint directory of a miniature: random weights, tokenizer, defaults."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from metainfer.arch.tiny import tiny_arch
from metainfer.weights.synth import write_checkpoint
from tests.fakes.tiny_tokenizer import write_tokenizer

VOCAB = 512
POISON = VOCAB - 1
"""The token whose embedding is not a number: whoever reads it has no logits."""


def write_tiny_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Write it to `directory`, which must be new, and return that."""
    write_checkpoint(directory, tiny_arch(vocab_size=VOCAB), seed)
    write_tokenizer(directory, VOCAB)
    defaults = {"thinking": False}
    (directory / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    return directory


def poison(directory: Path) -> None:
    """Make the embedding of POISON NaN, as a broken file would."""
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    weights["embed.weight"][POISON] = float("nan")
    save_file(weights, file)
