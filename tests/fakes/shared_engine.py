"""A device for measuring without GPUs: areas are files that all ranks map; some ranks misbehave."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from metainfer.comm.measure_ways import HOST, RECEIVE, SEND, Place, Started
from metainfer.core.errors import MetainferError

LARGE = 2**16


class SharedEngine:
    """Copies are done when they are queued."""

    device = "cpu"
    collectives = "gloo"

    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        self._path = place.folder / f"areas-{place.rank}"
        self._bytes = place.area_bytes
        self._path.write_bytes(b"")
        os.truncate(self._path, 3 * self._bytes)
        self._base = {None: _mapped(str(self._path))}
        self._stages = (ctypes.c_ubyte * place.stages.size).from_buffer(place.stages.view)

    def area(self, name: str) -> torch.Tensor:
        words, view = self._bytes // 4, self._base[None]
        begin = (SEND, RECEIVE, HOST).index(name) * self._bytes
        return torch.frombuffer(view, dtype=torch.int32, count=words, offset=begin)

    def export(self) -> Any:
        return str(self._path)

    def open(self, rank: int, exported: Any) -> None:
        self._base[rank] = _mapped(exported)

    def address(self, name: str, rank: int | None = None) -> int:
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._base[rank]))
        return at + (SEND, RECEIVE, HOST).index(name) * self._bytes

    def stage(self) -> int:
        return ctypes.addressof(self._stages)

    def by_kernel(self, target: int, source: int, size: int, lanes: int) -> None:
        ctypes.memmove(target, source, size)

    def by_copy_engine(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def mark(self, lane: int, work: Started) -> Callable[[], bool]:
        work()
        return lambda: True

    def seconds(self, works: Sequence[Started], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            for work in works:
                work()
        return (time.perf_counter() - began) / calls

    def wait(self) -> None:
        pass


class SickEngine(SharedEngine):
    """Rank 1 stores one wrong word in large payloads, never ends a load, and dies of a copy that
    it takes from another rank."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._sick = place.rank == 1

    def by_kernel(self, target: int, source: int, size: int, lanes: int) -> None:
        if self._sick and self._others(source):
            time.sleep(600)
        super().by_kernel(target, source, size, lanes)
        if self._sick and self._others(target) and size >= LARGE:
            ctypes.memset(target + size // 2, 7, 4)

    def by_copy_engine(self, target: int, source: int, size: int) -> None:
        if self._sick and self._others(source):
            os.kill(os.getpid(), signal.SIGKILL)
        super().by_copy_engine(target, source, size)

    def _others(self, address: int) -> bool:
        return any(
            0 <= address - self.address(SEND, rank) < 3 * self._bytes
            for rank in self._base
            if rank is not None
        )


def honest(place: Place) -> SharedEngine:
    return SharedEngine(place)


def sick(place: Place) -> SharedEngine:
    return SickEngine(place)


def without_one(place: Place) -> SharedEngine:
    """Rank 1 sees no GPU."""
    if place.rank == 1:
        raise MetainferError("torch sees no GPU")
    return SharedEngine(place)


def dead(place: Place) -> SharedEngine:
    """Rank 1 ends as soon as it begins."""
    if place.rank == 1:
        os._exit(3)
    return SharedEngine(place)


def _mapped(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
