"""Check: a report of a checkpoint directory, as data; `metainfer weights check` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from metainfer.arch.families import read_arch
from metainfer.arch.manifest import MTP_PREFIX, TensorSpec, manifest
from metainfer.arch.record import Arch
from metainfer.core.dtypes import DType
from metainfer.core.errors import CheckpointError, UserError
from metainfer.weights.formats.scales import E8M0_NAN
from metainfer.weights.index import CheckpointIndex, TensorEntry
from metainfer.weights.load import map_tensor
from metainfer.weights.validate import Problem, find_problems

_PIECE_ELEMENTS = 16 * 2**20
Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Tensors that serve one purpose. `formats`: dtypes as the files spell them, sorted."""

    group: str
    formats: tuple[str, ...]
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a directory holds and what is wrong with it.

    Attributes:
        model: name of the model, None where config.json cannot be used.
        num_files, num_tensors, num_bytes: of the safetensors files, without headers.
        groups: in the order of the model; "mtp (unused)" are drafting blocks.
        problems: all of them; empty where the checkpoint can be served.
        deep: all data was read, too.
    """

    directory: str
    model: str | None
    num_files: int
    num_tensors: int
    num_bytes: int
    groups: tuple[GroupSummary, ...]
    problems: tuple[Problem, ...]
    deep: bool

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain data, with "ok"."""
        return {**asdict(self), "ok": self.ok}


def check_checkpoint(
    directory: str | Path, deep: bool = False, progress: Progress | None = None
) -> CheckReport:
    """Look at everything in a checkpoint directory and report; no problem is raised.

    Args:
        directory: with config.json and safetensors files.
        deep: read all data too: NaN, infinities, NaN scales, experts that do not exist.
        progress: called with (bytes read, bytes in all) while data is read.
    """
    directory = Path(directory)
    problems: list[Problem] = []
    arch = _read_arch(directory, problems)
    try:
        index = CheckpointIndex.read(directory)
    except CheckpointError as error:
        problems.append(Problem("file", error.message))
        index = CheckpointIndex(directory, {}, ())
    else:
        if arch is not None:
            problems += find_problems(index, arch)
        else:
            problems += [Problem("file", text) for text in index.problems]
    if deep:
        problems += _check_data(index, arch, progress)
    return CheckReport(
        directory=str(directory),
        model=None if arch is None else arch.name,
        num_files=len(index.paths),
        num_tensors=len(index.entries),
        num_bytes=sum(entry.nbytes for entry in index.entries.values()),
        groups=_summarise(index.entries.values()),
        problems=tuple(problems),
        deep=deep,
    )


def _read_arch(directory: Path, problems: list[Problem]) -> Arch | None:
    try:
        return read_arch(directory)
    except UserError as error:
        problems.append(Problem("config", error.message))
        return None


# The first part of a name that is found decides the group.
_GROUPS = (
    ("embedding", ("embed.",)),
    ("hyper-connections", ("hc_",)),
    ("indexers", (".indexer.",)),
    ("compressors", (".compressor.",)),
    ("attention", (".attn.",)),
    ("routers", (".ffn.gate.",)),
    ("routed experts", (".ffn.experts.",)),
    ("shared experts", (".ffn.shared_experts.",)),
    ("norms", ("norm.",)),
    ("head", ("head.",)),
    ("other", ("",)),
)
_MTP_GROUP = "mtp (unused)"


def _group_of(name: str) -> str:
    if name.startswith(MTP_PREFIX):
        return _MTP_GROUP
    return next(group for group, parts in _GROUPS if any(part in name for part in parts))


def _summarise(entries: Iterable[TensorEntry]) -> tuple[GroupSummary, ...]:
    by_group: dict[str, list[TensorEntry]] = {group: [] for group, _ in _GROUPS}
    by_group[_MTP_GROUP] = []
    for entry in entries:
        by_group[_group_of(entry.name)].append(entry)
    return tuple(
        GroupSummary(
            group=group,
            formats=tuple(sorted({entry.dtype for entry in members})),
            num_tensors=len(members),
            num_bytes=sum(entry.nbytes for entry in members),
        )
        for group, members in by_group.items()
        if members
    )


def _check_data(
    index: CheckpointIndex, arch: Arch | None, progress: Progress | None
) -> list[Problem]:
    """Read every tensor once, file by file, and report values that no model can mean."""
    specs = {} if arch is None else manifest(arch)
    total = sum(entry.nbytes for entry in index.entries.values())
    done = 0
    problems = []
    for entry in sorted(index.entries.values(), key=lambda entry: (entry.path, entry.start)):
        text = _bad_values(entry, specs.get(entry.name), arch)
        if text is not None:
            problems.append(Problem("value", f"{entry.name} {text}"))
        done += entry.nbytes
        if progress is not None:
            progress(done, total)
    return problems


def _bad_values(entry: TensorEntry, spec: TensorSpec | None, arch: Arch | None) -> str | None:
    """What is wrong with the values of one tensor."""
    is_scale = entry.dtype == "F8_E8M0" or (spec is not None and spec.dtype is DType.F8_E8M0)
    if entry.dtype in ("I8", "U8") and not is_scale:
        return None  # every byte is two fp4 codes
    try:
        values = map_tensor(entry).flatten()
    except CheckpointError as error:
        return f"cannot be read: {error.message}"
    count = 0
    for piece in values.split(_PIECE_ELEMENTS):
        if entry.dtype == "I64":
            if arch is not None:
                count += int(((piece < 0) | (piece >= arch.num_experts)).sum())
        elif piece.dtype is torch.uint8:
            count += int((piece == E8M0_NAN).sum())
        elif piece.dtype is torch.float8_e4m3fn:
            count += int(((piece.view(torch.uint8) & 0x7F) == 0x7F).sum())
        else:
            count += int((~torch.isfinite(piece)).sum())
    if not count:
        return None
    if entry.dtype == "I64":
        return f"names experts that do not exist ({count} times)"
    return f"has NaN or infinite values ({count})"
