"""A model of any size without its weights: shapes of tensors alone, on the device "meta"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from metainfer.arch.record import Arch
from metainfer.kernels.reference import BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.weights.shapes import ShapesOnly

CPU = Target("cpu")


def build_shapes(
    arch: Arch,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    activations: str = "plain",
    caches: CacheFormats = FP32_CACHES,
    registry: Registry | None = None,
    target: Target = CPU,
    kernel_order: str = "",
    expert: int = 1,
    context: int = 1,
    kv_shards: int = 1,
) -> DeepseekV4:
    """The model of one of `size` ranks, all of whose kernels are references where no registry is
    given."""
    with torch.device("meta"):
        return DeepseekV4(
            arch,
            ShapesOnly(arch, size, context, expert),
            registry=registry or Registry(BACKENDS),
            target=target,
            kernel_order=kernel_order if registry else "*=reference",
            group=_first_of(size),
            context=context,
            expert=expert,
            kv_shards=kv_shards,
            device=torch.device("meta"),
            compute_dtype=dtype,
            activations=activations,
            caches=caches,
        )


def _first_of(size: int) -> Any:
    """The first rank of so many, who talks to nobody."""
    return SimpleNamespace(
        rank=0,
        size=size,
        wire="plain",
        all_reduce=lambda partial, phase="": partial,
        part=lambda ranks: _first_of(len(ranks)),
    )
