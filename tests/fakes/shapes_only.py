"""A model of any size without its weights: shapes of tensors alone, on the device "meta"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from metainfer.arch.manifest import iterate
from metainfer.arch.record import Arch
from metainfer.kernels.reference import BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.weights.index import CheckpointIndex, TensorEntry
from metainfer.weights.load import _TORCH_DTYPES, Checkpoint

CPU = Target("cpu")


class ShapesOnly(Checkpoint):
    """The checkpoint of `arch` as one rank of `size` sees it, without a file."""

    def __init__(self, arch: Arch, size: int) -> None:
        entries = {
            spec.name: TensorEntry(spec.name, spec.dtype.value, spec.shape, Path(), 0, 0)
            for spec in iterate(arch)
        }
        super().__init__(CheckpointIndex(Path(), entries, ()), arch, 0, size)

    def _whole(self, entry: TensorEntry) -> torch.Tensor:
        return torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype], device="meta")

    def expert_table(self, name: str) -> torch.Tensor:
        return self.tensor(name)

    def _stack(
        self, prefix: str, ids: Sequence[int], suffix: str, device: torch.device | str
    ) -> torch.Tensor:
        one = self.tensor(f"{prefix}.{ids[0]}.{suffix}")
        return torch.empty((len(ids), *one.shape), dtype=one.dtype, device=device)


def build_shapes(
    arch: Arch,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    activations: str = "plain",
    caches: CacheFormats = FP32_CACHES,
    registry: Registry | None = None,
    target: Target = CPU,
) -> DeepseekV4:
    """The model of one of `size` ranks, all of whose kernels are references where no registry is
    given."""
    group: Any = SimpleNamespace(rank=0, size=size, all_reduce=lambda partial: partial)
    with torch.device("meta"):
        return DeepseekV4(
            arch,
            ShapesOnly(arch, size),
            registry=registry or Registry(BACKENDS),
            target=target,
            kernel_order="" if registry else "*=reference",
            group=group,
            device=torch.device("meta"),
            compute_dtype=dtype,
            activations=activations,
            caches=caches,
        )
