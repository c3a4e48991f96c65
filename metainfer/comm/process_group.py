"""What all groups whose ranks are processes have in common: objects, and how an operation ends."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from metainfer.comm.group import Aborted, GroupError
from metainfer.comm.watch import Watch

T = TypeVar("T")


class ProcessGroup:
    """Attributes:
    rank, size: of this group.
    members: which ranks of the world they are.
    device: where tensors of the group are.
    """

    device = torch.device("cpu")

    def __init__(self, members: Sequence[int], rank: int, watch: Watch) -> None:
        self.rank, self.size, self.members = rank, len(members), tuple(members)
        self._watch = watch
        self._inside = False
        self._closed = False

    def all_gather(self, part_N: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, value: T) -> list[T] | None:
        with self._during("gather", 0):
            found = self._exchange(pickle.dumps(value))
            return [pickle.loads(one) for one in found] if self.rank == 0 else None

    def broadcast(self, value: T) -> T:
        with self._during("broadcast", 0):
            found = self._exchange(pickle.dumps(value) if self.rank == 0 else b"")
            if self.rank == 0:
                return value
            first: T = pickle.loads(found[0])
            return first

    def abort(self, why: str) -> None:
        """End what all ranks of the world wait for, whichever group they wait in."""
        self._watch.fail(why)

    def check(self) -> None:
        """Raises GroupError where a rank of the world has given up or ended."""
        self._watch.check()

    @contextmanager
    def _during(self, operation: str, size: int) -> Iterator[None]:
        """An operation of `size` bytes. Where it fails it fails for all: ranks that do not agree on
        how far they are can do nothing more together."""
        if self._inside:  # a part of another operation
            yield
            return
        if self._closed:
            raise GroupError(f"rank {self.rank} has left this group")
        self._watch.begin(operation, size)
        self._begin(operation, size)
        self._inside = True
        try:
            yield
        except Aborted:
            raise
        except GroupError as error:
            self._watch.fail(str(error))
            raise
        finally:
            self._inside = False

    def _begin(self, operation: str, size: int) -> None:
        """Where a group tells its members what it does, in its own way."""

    def _exchange(self, own: bytes) -> list[bytes]:
        """Bytes of all, of any lengths."""
        lengths = self.all_gather(self._tensor(len(own).to_bytes(8, "little")))
        counts = lengths.cpu().view(torch.int64).tolist()
        longest = max(counts)
        if not longest:
            return [b""] * self.size
        padded = self.all_gather(self._tensor(own.ljust(longest, b"\0"))).cpu()
        rows = padded.view(self.size, longest).numpy()
        return [rows[rank, :count].tobytes() for rank, count in enumerate(counts)]

    def _all_numbers(self, number: int) -> list[int]:
        found = self._exchange(number.to_bytes(8, "little"))
        return [int.from_bytes(one, "little") for one in found]

    def _tensor(self, own: bytes) -> torch.Tensor:
        made = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return made.to(self.device)
