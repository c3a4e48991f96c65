"""Memory that several processes have: it belongs to no file, and is gone when all have ended."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

from metainfer.comm.group import Stalled

_WORD = 8  # bytes of a counter, which is read and written whole


class SharedMemory:
    """Bytes that processes started with it share (Linux)."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("metainfer")
        try:
            os.ftruncate(self._file, size)
            self.view = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return _joined, (reduction.DupFd(self._file), self.size)

    def close(self) -> None:
        """Here alone; views of it must be gone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.view.close()


def _joined(duplicate: Any, size: int) -> SharedMemory:
    memory = SharedMemory.__new__(SharedMemory)
    memory._file = duplicate.detach()
    memory.view = mmap.mmap(memory._file, size)
    memory.size = size
    return memory


class Counters:
    """Numbers that one process each writes and all read."""

    def __init__(self, memory: SharedMemory) -> None:
        self._numbers = memoryview(memory.view).cast("Q")

    def __getitem__(self, place: int) -> int:
        return self._numbers[place]

    def __setitem__(self, place: int, number: int) -> None:
        self._numbers[place] = number

    def close(self) -> None:
        self._numbers.release()


def counter_bytes(count: int) -> int:
    return count * _WORD


class Meeting:
    """Where ranks wait for each other. Each has a counter; stages are numbers that only grow."""

    def __init__(self, counters: Counters, rank: int, first: int = 0) -> None:
        self._counters, self._rank, self._first = counters, rank, first

    def wait(self, ranks: Sequence[int], stage: int, until_s: float) -> None:
        """Until all `ranks` have come to `stage`. Raises Stalled naming who did not by `until_s`
        (of the monotonic clock)."""
        self._counters[self._first + self._rank] = stage
        late = [rank for rank in ranks if rank != self._rank]

        def all_there() -> bool:
            late[:] = [rank for rank in late if self._counters[self._first + rank] < stage]
            return not late

        if not wait_for(all_there, until_s):
            raise Stalled(f"rank {self._rank} waited for {', '.join(map(str, late))} in vain")


def wait_for(condition: Callable[[], bool], until_s: float) -> bool:
    """Ask again and again, leaving the processor to others in between; False when it is late."""
    while not condition():
        if time.monotonic() > until_s:
            return False
        os.sched_yield()
    return True
