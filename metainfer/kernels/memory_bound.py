"""How much memory a process may take where several work side by side, and how it looks where that
did not suffice."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import torch

_WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "can't start new thread")


class NoRoomError(Exception):
    """Memory did not suffice for a check.

    Attributes:
        outcome: of the check, if nothing is done about it.
    """

    def __init__(self, outcome: Any) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def bound_memory(device: str, most_bytes: int) -> None:
    """From here on the calling process takes no more than so much: of the current GPU's memory, or
    of the host's beyond what it has. What asks for more raises."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(None).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = _taken_bytes() + most_bytes
    if hard == resource.RLIM_INFINITY or bound < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, of a GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def _taken_bytes() -> int:
    """Private memory that this process may write."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    return 0
