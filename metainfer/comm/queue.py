"""What groups of GPUs need of a GPU: memory that others open, and work in the order it was told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Queue(Protocol):
    """What a GPU does in the order that it is told (`device_queue.CudaQueue`).

    Attributes:
        device: where tensors are.
    """

    @property
    def device(self) -> torch.device: ...

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes: ...

    def open(self, exported: bytes) -> int: ...

    def close(self, address: int) -> None: ...

    def reach(self, address: int, size: int) -> int:
        """Pin whole pages of the host; where this GPU finds them."""

    def forget(self, address: int) -> None:
        """Of pages of the host that were pinned."""

    def copy_now(self, target: int, source: int, size: int) -> None:
        """Queue a copy by the copy engine."""

    def load_now(self, target: int, source: int, size: int) -> None:
        """Queue a copy by a kernel, of multiples of 64 bytes between multiples of 16."""

    def write_now(self, address: int, number: int) -> None:
        """Queue the writing of a flag behind all that was queued."""

    def write_beside(self, address: int, number: int) -> None:
        """Write a flag in this GPU's memory at once, whatever is queued."""

    def wait_now(self, address: int, number: int) -> None:
        """Queue a wait until a flag is `number` or more."""

    def mark(self) -> Callable[[], bool]:
        """Tells whether all that was queued so far is done."""
