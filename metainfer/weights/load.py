"""Checkpoint: reads tensors of a checked directory, memory-mapped, each rank only its slices."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from metainfer.arch.manifest import MTP_PREFIX
from metainfer.arch.record import Arch
from metainfer.arch.split import (
    check_split,
    division,
    expert_of,
    own_experts,
    rank_shape,
    rank_share,
    split_dimension,
)
from metainfer.arch.stages import Stage
from metainfer.core.errors import CheckpointError
from metainfer.weights.formats import DenseWeight, Fp4GroupWeight, Fp8BlockWeight, Weight
from metainfer.weights.index import CheckpointIndex, TensorEntry
from metainfer.weights.validate import find_problems, require_no_problems

# Packed codes and e8m0 scales are bytes to every kernel.
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
    "I64": torch.int64,
}


LoadProgress = Callable[[int, int], None]  # (bytes handed out, bytes in all)


class Checkpoint:
    """The tensors of one checkpoint, as one rank of `size` sees them.

    Tensors are views of the mapped files where they can be (whole tensors, slices of rows): treat
    them as read-only. They keep the mapping alive, and pages are read when first touched.

    Attributes:
        bytes_taken: of the slices that were handed out, each counted once.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        arch: Arch,
        rank: int,
        size: int,
        on_progress: LoadProgress | None = None,
        context: int = 1,
        expert: int = 1,
        stage: Stage | None = None,
    ) -> None:
        self.index = index
        self.arch = arch
        self.rank = rank
        self.size = size
        self.context = context
        self.expert = expert
        self.stage = stage
        self._mapped: dict[Path, torch.Tensor] = {}
        self._on_progress = on_progress
        self._handed_out: set[str] = set()
        self._bytes_done = 0
        self.bytes_taken = 0
        used = (entry for entry in index.entries.values() if self._is_used(entry.name))
        self._bytes_in_all = sum(entry.nbytes for entry in used)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        arch: Arch,
        *,
        rank: int = 0,
        size: int = 1,
        context: int = 1,
        expert: int = 1,
        stage: Stage | None = None,
        on_progress: LoadProgress | None = None,
        more_layers: bool = False,
    ) -> Checkpoint:
        """Check all files against `arch`, and read nothing else yet.

        Args:
            context, expert: see `arch.split.division`.
            stage: of which the rank is one of `size`; None where all layers are on one.
            more_layers: the files may hold layers after the last one of `arch`, which is cut.
            on_progress: called whenever a tensor was first handed out, with the bytes so far and
                those of all tensors that this rank uses (whole ones, whatever it takes of them).

        Raises:
            CheckpointError: listing everything that is wrong.
            UserError: `size` ranks cannot divide the model.
        """
        check_split(arch, size, expert)
        index = CheckpointIndex.read(directory)
        if more_layers:
            index = _without_later_layers(index, arch.num_layers)
        require_no_problems(index.directory, arch, find_problems(index, arch))
        return cls(index, arch, rank, size, on_progress, context, expert, stage)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the tensors that the model does not use (drafting blocks)."""
        return tuple(name for name in self.index.entries if name.startswith(MTP_PREFIX))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's slice of a tensor, on the CPU, in its stored dtype or converted to `dtype`.

        Bytes (packed fp4 codes, e8m0 scales) come as uint8.
        """
        entry = self._entry(name)
        whole = self._whole(entry)
        fresh = name not in self._handed_out
        if fresh:
            self._handed_out.add(name)
            self._bytes_done += entry.nbytes
            if self._on_progress is not None:
                self._on_progress(self._bytes_done, self._bytes_in_all)
        dimension = split_dimension(name)
        part, parts = division(name, self.rank, self.size, self.context, self.expert)
        if dimension is not None and parts > 1:
            first, share = rank_share(whole.shape[dimension], part, parts)
            whole = whole.narrow(dimension, first, share).contiguous()
        if fresh:
            self.bytes_taken += whole.nbytes
        return whole if dtype is None else whole.to(dtype)

    def weight(self, prefix: str) -> Weight:
        """This rank's slice of the matrix `prefix` (such as "layers.0.attn.wq_a"), quantised as it
        is stored."""
        codes = self.tensor(f"{prefix}.weight")
        if f"{prefix}.scale" not in self.index.entries:
            return DenseWeight(codes)
        return self._quantised(codes, self.tensor(f"{prefix}.scale"))

    def expert_table(self, name: str) -> torch.Tensor:
        """Which experts every token of the vocabulary goes to, int64 [V, K].

        Raises CheckpointError where it names an expert that the model does not have.
        """
        table_VK = self.tensor(name)
        wrong_VK = (table_VK < 0) | (table_VK >= self.arch.num_experts)
        if bool(wrong_VK.any()):
            token, place = wrong_VK.nonzero()[0].tolist()
            raise CheckpointError(
                f"{name} names experts that do not exist in {int(wrong_VK.sum())} places, first"
                f" {int(table_VK[token, place])} of {self.arch.num_experts} for token {token}",
                hint="the files are damaged or of another model: `metainfer weights check --deep`"
                " reads them all",
            )
        return table_VK

    def experts(
        self, prefix: str, ids: Sequence[int], device: torch.device | str = "cpu"
    ) -> tuple[Weight, Weight, Weight]:
        """w1, w2 and w3 of the experts `ids` of `prefix` (such as "layers.3.ffn.experts").

        Each is one stacked weight [E, O, I], allocated once on `device` and filled expert by
        expert, so that no second copy exists at any time.
        """
        stacked = []
        for matrix in ("w1", "w2", "w3"):
            codes = self._stack(prefix, ids, f"{matrix}.weight", device)
            scale_name = f"{matrix}.scale"
            if f"{prefix}.{ids[0]}.{scale_name}" in self.index.entries:
                scale = self._stack(prefix, ids, scale_name, device)
                stacked.append(self._quantised(codes, scale))
            else:
                stacked.append(DenseWeight(codes))
        return stacked[0], stacked[1], stacked[2]

    def close(self) -> None:
        """Drop the mappings that no tensor uses any more."""
        self._mapped.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _quantised(self, codes: torch.Tensor, scale: torch.Tensor) -> Weight:
        if codes.dtype is torch.float8_e4m3fn:
            return Fp8BlockWeight(codes, scale, self.arch.quantisation.fp8_block)
        return Fp4GroupWeight(codes, scale)

    def _stack(
        self, prefix: str, ids: Sequence[int], suffix: str, device: torch.device | str
    ) -> torch.Tensor:
        """One tensor of all experts `ids`, [E, ...]."""
        names = [f"{prefix}.{expert}.{suffix}" for expert in ids]
        first = self._entry(names[0])
        shape = rank_shape(names[0], first.shape, self.size, self.context, self.expert)
        dtype = TORCH_DTYPES[first.dtype]
        stack = torch.empty((len(names), *shape), dtype=dtype, device=device)
        for slot, name in enumerate(names):
            stack[slot].copy_(self.tensor(name))
        return stack

    def _is_used(self, name: str) -> bool:
        """Whether this rank has a part of the tensor `name`."""
        if self.stage is not None and not self.stage.has(name):
            return False
        expert = expert_of(name)
        own = own_experts(self.arch.num_experts, self.rank, self.size, self.expert)
        return not name.startswith(MTP_PREFIX) and (expert is None or expert in own)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.index.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.index.directory} has no tensor {name}")
        return entry

    def _whole(self, entry: TensorEntry) -> torch.Tensor:
        mapped = self._mapped.get(entry.path)
        if mapped is None:
            mapped = self._mapped[entry.path] = _map_file(entry.path)
        return _view(mapped, entry)


def _without_later_layers(index: CheckpointIndex, count: int) -> CheckpointIndex:
    """The index without the tensors of all layers but the first `count`."""

    def is_kept(name: str) -> bool:
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        return first != "layers" or not number.isdecimal() or int(number) < count

    kept = {name: entry for name, entry in index.entries.items() if is_kept(name)}
    return replace(index, entries=kept)


def map_tensor(entry: TensorEntry) -> torch.Tensor:
    """The whole tensor of `entry` as a view of its file, which stays mapped as long as the tensor
    lives. Bytes come as uint8.

    Raises:
        CheckpointError: the file cannot be mapped, or has a dtype that metainfer does not read.
    """
    return _view(_map_file(entry.path), entry)


def _view(mapped: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(f"{entry.name} is {entry.dtype}, which metainfer does not read")
    data = mapped[entry.start : entry.stop]
    if data.nbytes != entry.nbytes:
        raise CheckpointError(f"{entry.path} became shorter while it was in use")
    if entry.start % dtype.itemsize:
        data = data.clone()  # the format does not promise alignment
    return data.view(dtype).view(entry.shape)


def _map_file(path: Path) -> torch.Tensor:
    """The mapped file as uint8 [bytes]. Private: a write would not reach the file."""
    try:
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        message = f"{path} cannot be mapped into memory: {error.strerror}"
        raise CheckpointError(message) from error
    return torch.frombuffer(pages, dtype=torch.uint8)
