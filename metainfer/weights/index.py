"""CheckpointIndex: which tensor lies where in a directory of safetensors files.

Headers are read and judged here, by the rules of the format (8 bytes of length, JSON, data without
gaps or overlaps), before any data is touched. Nothing is raised for a bad file: every problem is
kept, so that all are reported together.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from metainfer.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_INDEX_BYTES = 2**30
_MAX_DIMENSIONS = 16
_MAX_COUNT = 2**63
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

# Bits per element, for every dtype that the format names.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a file declares it: bytes [start, stop) of `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors of a directory, and what is wrong with its files.

    Attributes:
        entries: by tensor name; only of headers that could be read.
        paths: the files, in order.
        problems: one sentence each; empty where every file keeps the format's rules.
    """

    directory: Path
    entries: Mapping[str, TensorEntry]
    paths: tuple[Path, ...]
    problems: tuple[str, ...] = field(default=())

    @classmethod
    def read(cls, directory: str | Path) -> CheckpointIndex:
        """Read the index and all headers.

        Raises:
            CheckpointError: there is no safetensors checkpoint in `directory`, or its index file
                cannot be read.
        """
        directory = Path(directory)
        try:
            paths, weight_map, problems = _find_files(directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
        entries: dict[str, TensorEntry] = {}
        for path in paths:
            try:
                found = read_header(path)
            except CheckpointError as error:
                problems.append(error.message)
                continue
            for name, entry in found.items():
                if name in entries:
                    other = entries[name].path.name
                    problems.append(f"{name} is both in {other} and in {path.name}")
                entries[name] = entry
            if weight_map is not None:
                problems += _against_index(path.name, found, weight_map)
        return cls(directory, entries, tuple(paths), tuple(problems))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that the header of one safetensors file declares.

    Raises:
        CheckpointError: the file breaks the format; the message names the file and what is wrong.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(f"{path.name} has {size} bytes, too few for a header")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path.name} declares a header of {length} bytes, "
                    f"but the file has {size} bytes in all"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} has a header that is not a JSON object")
    header.pop("__metadata__", None)

    data_start = 8 + length
    entries = {}
    for name, declared in header.items():
        entries[name] = _entry(path, name, declared, data_start, size)
    _check_layout(path, entries.values(), data_start, size)
    return entries


def _entry(path: Path, name: str, declared: Any, data_start: int, size: int) -> TensorEntry:
    """One declared tensor, its numbers checked against each other and against the file's size."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{path.name} declares {reprlib.repr(name)} {what}")

    if not isinstance(declared, dict):
        raise refuse("without an object")
    dtype, shape, offsets = (declared.get(key) for key in ("dtype", "shape", "data_offsets"))
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if not isinstance(dtype, str) or bits is None:
        raise refuse(f"with the unknown dtype {reprlib.repr(dtype)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise refuse(f"with the shape {reprlib.repr(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"with the offsets {reprlib.repr(offsets)}")
    start, stop = (data_start + offset for offset in offsets)
    if stop > size:
        raise refuse(
            f"up to byte {stop}, but the file ends at byte {size}; it is truncated or damaged"
        )
    if math.prod(shape) * bits != 8 * (stop - start):
        raise refuse(f"as {dtype} {list(shape)}, which does not fill its {stop - start} bytes")
    return TensorEntry(name, dtype, tuple(shape), path, start, stop)


def _check_layout(path: Path, entries: Iterable[TensorEntry], data_start: int, size: int) -> None:
    """The data must be covered without gaps and overlaps, as the format demands."""
    position, before = data_start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            how = "overlaps with" if entry.start < position else "leaves a gap after"
            raise CheckpointError(f"{path.name} declares {entry.name!r} where it {how} {before}")
        position, before = entry.stop, repr(entry.name)
    if position != size:
        raise CheckpointError(f"{path.name} has {size - position} bytes that no tensor claims")


def _find_files(directory: Path) -> tuple[list[Path], dict[str, str] | None, list[str]]:
    """The safetensors files, the index's map (None without an index), and problems."""
    if not directory.is_dir():
        raise CheckpointError(
            f"there is no directory {directory}", hint="give the directory of a checkpoint"
        )
    if (directory / INDEX_NAME).is_file():
        weight_map = _read_weight_map(directory / INDEX_NAME)
        paths, problems = [], []
        for file_name in sorted(set(weight_map.values())):
            path = directory / file_name
            if Path(file_name).name != file_name or file_name in ("", ".", ".."):
                problems.append(f"{INDEX_NAME} names {file_name!r}, which is not a plain file name")
            elif not path.is_file():
                count = sum(value == file_name for value in weight_map.values())
                problems.append(f"{file_name} is missing; {INDEX_NAME} puts {count} tensors in it")
            else:
                paths.append(path)
        return paths, weight_map, problems
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME], None, []
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found, None, []
    if found:
        raise CheckpointError(
            f"{directory} has {len(found)} safetensors files but no {INDEX_NAME}",
            hint="fetch the index file too",
        )
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{directory} has pickle files only ({', '.join(pickles[:3])}), which are refused: "
            "loading one can run any code",
            hint="fetch the safetensors version of the model, or convert it",
        )
    raise CheckpointError(
        f"{directory} has no safetensors files", hint="give the directory of a whole checkpoint"
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{path.name} is larger than any index")
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or any(not isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{path} has no weight_map from tensor names to file names",
            hint="fetch the index file again",
        )
    if not weight_map:
        raise CheckpointError(f"{path} lists no tensors", hint="fetch the index file again")
    return weight_map


def _against_index(
    file_name: str, found: Mapping[str, TensorEntry], weight_map: Mapping[str, str]
) -> list[str]:
    problems = [
        f"{INDEX_NAME} puts {name} in {file_name}, which does not have it"
        for name, value in weight_map.items()
        if value == file_name and name not in found
    ]
    problems += [
        f"{file_name} has {name}, which {INDEX_NAME} does not list"
        for name in found
        if name not in weight_map
    ]
    return problems


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MAX_COUNT for item in value
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return out
