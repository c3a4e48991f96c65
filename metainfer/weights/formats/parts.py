"""A rank's part of a matrix, whatever its format."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from metainfer.arch.split import rank_share
from metainfer.weights.formats.dense import DenseWeight
from metainfer.weights.formats.fp4_group import Fp4GroupWeight
from metainfer.weights.formats.fp8_block import Fp8BlockWeight

Weight = DenseWeight | Fp8BlockWeight | Fp4GroupWeight


def part_of(weight: Weight, dimension: int, rank: int, size: int) -> Weight:
    """The part of a matrix [O, I] that a rank has of its rows (0) or columns (1), as views; codes
    and scales are cut alike, as `arch.split` says."""
    if size == 1:
        return weight
    parts: dict[str, Any] = {}
    for field in fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, torch.Tensor):
            first, share = rank_share(value.shape[dimension], rank, size)
            parts[field.name] = value.narrow(dimension, first, share)
    return replace(weight, **parts)
