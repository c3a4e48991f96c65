"""Writes a checkpoint directory: shards, index and config, all or nothing.

Everything is written into a hidden directory beside the target (or beside the first of its parents
that must be made), which takes the target's name when it is complete: a full disk, Ctrl-C or a
crash never leaves something that looks like a checkpoint.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from metainfer.arch.manifest import TensorSpec
from metainfer.core.errors import UserError
from metainfer.core.threads import in_threads
from metainfer.weights.index import INDEX_NAME, SINGLE_NAME

DEFAULT_SHARD_BYTES = 4 * 2**30

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)
Chunks = Callable[[TensorSpec], Iterable[torch.Tensor]]


def write_safetensors(
    directory: str | Path,
    specs: Sequence[TensorSpec],
    chunks: Chunks,
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    copies: Sequence[Path] = (),
    progress: Progress | None = None,
    workers: int = 1,
) -> Path:
    """Write the tensors `specs` in order, shard by shard, with config.json beside them.

    Args:
        directory: must not exist, or be empty.
        chunks: gives a tensor's data in pieces, contiguous and in order, of any dtype; their bytes
            must add up to `spec.nbytes`. Only one piece of each worker is in memory at a time.
        max_shard_bytes: a shard holds at least one tensor and else no more than this.
        copies: files that go with it under their own names, such as those of a tokenizer.
        progress: called after every piece.
        workers: threads, each of which writes a shard at a time; with several, `chunks` and its
            pieces are asked for from all of them, and `progress` is called by one after another.

    Returns:
        The directory.

    Raises:
        UserError: the target is not empty, or cannot be written (nothing is left behind).
    """
    target = Path(directory).absolute()
    total = sum(spec.nbytes for spec in specs)
    existing = next(parent for parent in target.parents if parent.exists())
    held: int | None = None  # a lock as long as this process lives
    partial = existing / f".{target.name}.partial-{os.getpid()}"
    try:
        _remove_left_over(existing, target.name)
        _require_room(target, existing, total)
        partial.mkdir()
        held = os.open(partial, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        shards = list(_shards(specs, max_shard_bytes))
        _write_shards(partial, shards, chunks, _Reporter(progress, total), workers)
        _write_rest(partial, shards, config)
        for file in copies:
            shutil.copyfile(file, partial / file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(target)
    except OSError as error:
        raise UserError(
            f"the checkpoint {target} could not be written: {error.strerror}",
            hint=f"it needs {total / 1e9:.2f} GB; choose a place with more room that you may write",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if held is not None:
            os.close(held)
    return target


def _remove_left_over(directory: Path, name: str) -> None:
    """What writers of the same target left that were killed: they hold no lock any more."""
    for path in directory.glob(f".{glob.escape(name)}.partial-*"):
        with suppress(OSError):  # its writer lives, or has just ended
            held = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(held)


def _require_room(target: Path, existing: Path, total: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists and is not empty", hint="remove it, or choose another directory"
        )
    free = shutil.disk_usage(existing).free
    if free < total:
        needs, has = f"{total / 1e9:.2f} GB", f"{free / 1e9:.2f} GB"
        raise UserError(
            f"the checkpoint needs {needs}, but {existing} has {has} free",
            hint="choose a place with more room",
        )


def _write_shards(
    directory: Path,
    shards: Sequence[Sequence[TensorSpec]],
    chunks: Chunks,
    report: _Reporter,
    workers: int,
) -> None:
    def write(number: int) -> None:
        with (directory / _file_name(number, len(shards))).open("wb") as file:
            file.write(_header(shards[number]))
            for spec in shards[number]:
                _write_tensor(file, spec, chunks(spec), report)
            file.flush()
            os.fsync(file.fileno())

    tasks = [partial(write, number) for number in range(len(shards))]
    if workers == 1:
        for task in tasks:
            task()
    else:
        in_threads(tasks, min(workers, len(tasks)), report.stop)


def _write_rest(
    directory: Path, shards: Sequence[Sequence[TensorSpec]], config: Mapping[str, Any]
) -> None:
    """Index and config."""
    if len(shards) > 1:
        weight_map = {
            spec.name: _file_name(number, len(shards))
            for number, shard in enumerate(shards)
            for spec in shard
        }
        total = sum(spec.nbytes for shard in shards for spec in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _file_name(number: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_tensor(
    file: BinaryIO,
    spec: TensorSpec,
    pieces: Iterable[torch.Tensor],
    report: _Reporter,
) -> None:
    written = 0
    for piece in pieces:
        if piece.nbytes:
            data = piece.detach().contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(data.numpy()))
        written += piece.nbytes
        report(piece.nbytes)
    if written != spec.nbytes:
        raise ValueError(f"{spec.name}: {written} bytes were given for {spec.nbytes}")


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and JSON of a safetensors header, padded to 8 bytes."""
    declared: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        offsets = [position, position + spec.nbytes]
        declared[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": list(spec.shape),
            "data_offsets": offsets,
        }
        position += spec.nbytes
    text = json.dumps(declared, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> Iterator[list[TensorSpec]]:
    """Consecutive tensors, as many as fit; widest elements first within a shard, so that every
    tensor lies aligned in its file."""
    shard: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        if shard and filled + spec.nbytes > max_shard_bytes:
            yield sorted(shard, key=lambda spec: -spec.dtype.size_bytes)
            shard, filled = [], 0
        shard.append(spec)
        filled += spec.nbytes
    if shard:
        yield sorted(shard, key=lambda spec: -spec.dtype.size_bytes)


class _Reporter:
    """Adds up what was written, in any thread."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = 0
        self._stopped = False
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """So much more was written. Raises _StoppedError once it is to stop."""
        if self._stopped:
            raise _StoppedError
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def stop(self) -> None:
        self._stopped = True


class _StoppedError(Exception):
    """Another thread failed, or nobody wants what is written any more."""
