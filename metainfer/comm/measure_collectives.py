"""Collectives of a library (NCCL) through torch.distributed, verified and timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from metainfer.comm.payload import small_numbers
from metainfer.core.errors import MetainferError, first_line

_LIMIT_S = 20.0
_ELEMENT_BYTES = 2  # bf16

Seconds = Callable[[Sequence[Callable[[], None]], int], float]


class Collectives:
    """One rank's part in groups, of which there is one at a time."""

    def __init__(
        self, rank: int, device: str, library: str, folder: Path, seconds: Seconds
    ) -> None:
        """
        Args:
            library: torch's name, "nccl" or "gloo".
            folder: where the ranks of a group find each other.
            seconds: as of `Engine`.
        """
        self._rank, self._device, self._library = rank, device, library
        self._folder, self._seconds = folder, seconds
        self._gpus: tuple[int, ...] = ()
        self._joined: Counter[tuple[int, ...]] = Counter()

    def join(self, gpus: tuple[int, ...]) -> None:
        """Make the group of these ranks. Raises MetainferError saying why there is none."""
        if gpus == self._gpus:
            return
        self.leave()
        if not dist.is_available():
            raise MetainferError("this torch has no torch.distributed")
        self._joined[gpus] += 1  # the same at all of its ranks
        path = self._folder / f"group-{'-'.join(map(str, gpus))}-{self._joined[gpus]}"
        try:
            store = dist.FileStore(str(path), len(gpus))
            dist.init_process_group(
                self._library,
                store=store,
                rank=gpus.index(self._rank),
                world_size=len(gpus),
                timeout=timedelta(seconds=_LIMIT_S),
                device_id=None if self._device == "cpu" else _current_device(),
            )
            dist.all_reduce(torch.ones(1, device=self._device))
            if self._device != "cpu":
                torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            self._gpus = gpus if dist.is_initialized() else ()
            self.leave()
            raise MetainferError(f"{self._library}: {first_line(error)}") from error
        self._gpus = gpus

    def leave(self) -> None:
        if self._gpus:
            self._gpus = ()
            dist.destroy_process_group()

    def verify(self, operation: str, size: int, number: int) -> str:
        """Run once; says what was wrong."""
        given, taken = self._tensors(operation, size, number)
        _run(operation, given, taken)
        wrong = int((taken != self._expected(operation, given, number)).sum())
        if wrong:
            return f"{wrong} of {taken.numel()} numbers of rank {self._rank} are wrong"
        return ""

    def clock(self, operation: str, size: int, number: int, calls: int) -> float:
        """Seconds of a call. Sums of sums grow, which takes as long."""
        given, taken = self._tensors(operation, size, number)
        return self._seconds([partial(_run, operation, given, taken)], calls)

    def _tensors(self, operation: str, size: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16: what this rank gives, `size` bytes of it, and where the result goes."""
        count = max(size // _ELEMENT_BYTES // len(self._gpus), 1) * len(self._gpus)
        given = small_numbers(count, self._rank, number, self._device)
        if operation == "all_reduce":
            return given, given
        results = count * len(self._gpus) if operation == "all_gather" else count // len(self._gpus)
        return given, torch.full((results,), -1.0, dtype=given.dtype, device=self._device)

    def _expected(self, operation: str, given: torch.Tensor, number: int) -> torch.Tensor:
        parts = (small_numbers(given.numel(), r, number, self._device) for r in self._gpus)
        if operation == "all_gather":
            return torch.cat(list(parts))
        total = next(parts)
        for part in parts:
            total += part  # whole numbers below 64
        if operation == "all_reduce":
            return total
        return total.chunk(len(self._gpus))[self._gpus.index(self._rank)]


def _run(operation: str, given: torch.Tensor, taken: torch.Tensor) -> None:
    if operation == "all_reduce":
        dist.all_reduce(taken)
    elif operation == "all_gather":
        dist.all_gather_into_tensor(taken, given)
    else:
        dist.reduce_scatter_tensor(taken, given)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
