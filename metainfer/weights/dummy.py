"""DummyCheckpoint: a checkpoint of any Arch that exists nowhere: its tensors are drawn when asked.

They have the released names, formats and magnitudes, as `synth` has them, and are made on the
device that they stay on: nothing is read, and no copy lies in the host's memory. A tensor follows
from its name and the seed alone, by integer arithmetic that is the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from metainfer.arch.manifest import MTP_PREFIX, TensorSpec, iterate
from metainfer.arch.record import Arch
from metainfer.arch.split import check_split, division, rank_shape, rank_share, split_dimension
from metainfer.arch.stages import Stage
from metainfer.core.dtypes import DType
from metainfer.weights.index import CheckpointIndex, TensorEntry
from metainfer.weights.load import Checkpoint, LoadProgress
from metainfer.weights.synth import RandomTensors

_PIECE_ELEMENTS = 2**24  # drawn at once: five or six numbers of 4 bytes are held for each
_GOLDEN = -0x61C88647  # 2^32 over the golden ratio, as int32
_MIX = ((16, 0x7FEB352D), (15, -0x7B935975), (16, None))
"""Shifts and factors of a mixing function of 32 bits ("lowbias32"): every bit of the number that
goes in reaches every bit of what comes out."""


class DummyCheckpoint(Checkpoint):
    """What `Checkpoint` gives of files, of random tensors. Drafting blocks are left out."""

    def __init__(
        self,
        arch: Arch,
        device: torch.device | str,
        *,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        context: int = 1,
        expert: int = 1,
        stage: Stage | None = None,
        on_progress: LoadProgress | None = None,
    ) -> None:
        """Raises UserError if `size` ranks cannot divide the model."""
        check_split(arch, size, expert)
        self._specs = {s.name: s for s in iterate(arch) if not s.name.startswith(MTP_PREFIX)}
        place = Path(f"{arch.name} (dummy)")
        entries = {
            name: TensorEntry(name, spec.dtype.value, spec.shape, place, 0, spec.nbytes)
            for name, spec in self._specs.items()
        }
        index = CheckpointIndex(place, entries, ())
        super().__init__(index, arch, rank, size, on_progress, context, expert, stage)
        self._device = torch.device(device)
        self._seed = seed
        self._values = RandomTensors(arch, seed)
        self._tables: dict[int, torch.Tensor] = {}

    def _whole(self, entry: TensorEntry) -> torch.Tensor:
        return self._draw([self._specs[entry.name]])[0]

    def _stack(
        self, prefix: str, ids: Sequence[int], suffix: str, device: torch.device | str
    ) -> torch.Tensor:
        """One tensor of all experts `ids`, [E, ...]: as many at a time as a piece holds."""
        specs = [self._specs[self._entry(f"{prefix}.{n}.{suffix}").name] for n in ids]
        first = specs[0]
        shape = rank_shape(first.name, first.shape, self.size, self.context, self.expert)
        at_once = max(1, _PIECE_ELEMENTS // math.prod(first.shape))
        stack: torch.Tensor | None = None
        for start in range(0, len(specs), at_once):
            drawn = self._draw(specs[start : start + at_once])
            dimension = split_dimension(first.name)
            part = division(first.name, self.rank, self.size, self.context, self.expert)
            if dimension is not None and part[1] > 1:
                share = rank_share(first.shape[dimension], *part)
                drawn = drawn.narrow(dimension + 1, *share)
            if stack is None:
                stack = torch.empty((len(specs), *shape), dtype=drawn.dtype, device=device)
            stack[start : start + at_once].copy_(drawn)
            self.bytes_taken += drawn.nbytes
        assert stack is not None
        self._count(specs)
        return stack

    def _count(self, specs: Sequence[TensorSpec]) -> None:
        """Tell who watches that these were handed out."""
        fresh = [spec for spec in specs if spec.name not in self._handed_out]
        self._handed_out.update(spec.name for spec in fresh)
        self._bytes_done += sum(spec.nbytes for spec in fresh)
        if self._on_progress is not None and fresh:
            self._on_progress(self._bytes_done, self._bytes_in_all)

    def _draw(self, specs: Sequence[TensorSpec]) -> torch.Tensor:
        """Tensors that are alike but for their names, [E, ...]."""
        first = specs[0]
        if first.dtype is DType.I64:
            return torch.stack([self._expert_ids(spec) for spec in specs])
        table = self._values.table(first)
        stored = self._tables.get(id(table))
        if stored is None:
            stored = self._tables[id(table)] = torch.from_numpy(table.stored).to(self._device)
        elements = math.prod(first.shape)
        drawn = torch.empty((len(specs), elements), dtype=stored.dtype, device=self._device)
        keys_E1 = self._keys(specs)
        for start in range(0, elements, _PIECE_ELEMENTS):
            stop = min(start + _PIECE_ELEMENTS, elements)
            chosen = self._hashes(keys_E1, start, stop).bitwise_and_(len(stored) - 1)
            values = stored.index_select(0, chosen.flatten())
            drawn[:, start:stop] = values.view(chosen.shape)
        return drawn.view(table.dtype).view(len(specs), *first.shape)

    def _expert_ids(self, spec: TensorSpec) -> torch.Tensor:
        """Rows of distinct experts: a random start, then random steps that together stay below
        one round."""
        rows, per_row = spec.shape
        num_experts = self.arch.num_experts
        drawn = self._hashes(self._keys([spec]), 0, rows * per_row).view(rows, per_row).long()
        steps = (drawn & 0x7FFFFFFF) % max(1, num_experts // per_row) + 1
        steps[:, 0] = (drawn[:, 0] & 0x7FFFFFFF) % num_experts
        return steps.cumsum(1) % num_experts

    def _keys(self, specs: Sequence[TensorSpec]) -> torch.Tensor:
        """int32 [E, 1]: what tells each tensor's draws from those of others."""
        digests = (hashlib.sha256(f"{self._seed}:{spec.name}".encode()).digest() for spec in specs)
        keys = [int.from_bytes(digest[:4], "little", signed=True) for digest in digests]
        return torch.tensor(keys, dtype=torch.int32, device=self._device).unsqueeze(1)

    def _hashes(self, keys_E1: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """int32 [E, stop - start]: bits that look random, of the elements start .. stop - 1."""
        element = torch.arange(start, stop, dtype=torch.int32, device=self._device)
        x = element.mul_(_GOLDEN).unsqueeze(0).bitwise_xor(keys_E1)
        for shift, factor in _MIX:
            x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
            if factor is not None:
                x *= factor
        return x
