"""ShapesOnly: a checkpoint of any Arch whose tensors have shapes and types, and no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from metainfer.arch.manifest import iterate
from metainfer.arch.record import Arch
from metainfer.weights.index import CheckpointIndex, TensorEntry
from metainfer.weights.load import TORCH_DTYPES, Checkpoint


class ShapesOnly(Checkpoint):
    """The checkpoint of `arch` as the first rank of `size` sees it, without a file."""

    def __init__(self, arch: Arch, size: int = 1, context: int = 1, expert: int = 1) -> None:
        entries = {
            spec.name: TensorEntry(spec.name, spec.dtype.value, spec.shape, Path(), 0, 0)
            for spec in iterate(arch)
        }
        index = CheckpointIndex(Path(), entries, ())
        super().__init__(index, arch, 0, size, context=context, expert=expert)

    def _whole(self, entry: TensorEntry) -> torch.Tensor:
        return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta")

    def expert_table(self, name: str) -> torch.Tensor:
        return self.tensor(name)

    def _stack(
        self, prefix: str, ids: Sequence[int], suffix: str, device: torch.device | str
    ) -> torch.Tensor:
        one = self.tensor(f"{prefix}.{ids[0]}.{suffix}")
        return torch.empty((len(ids), *one.shape), dtype=one.dtype, device=device)
