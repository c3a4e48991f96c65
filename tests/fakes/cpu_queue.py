"""A GPU's queue on the CPU: each piece of work is done when it is queued."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

_LONGEST_S = 20.0


class CpuQueue:
    """`comm.queue.Queue` of a thread; "GPUs" reach all memory of the process.

    Attributes:
        log: (what, bytes or number) of all that was done.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.owned: dict[int, Any] = {}
        self.opened: set[int] = set()
        self.reached: set[int] = set()

    def allocate(self, size: int) -> int:
        memory = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(memory)
        self.owned[address] = memory
        return address

    def free(self, address: int) -> None:
        del self.owned[address]

    def export(self, address: int) -> bytes:
        assert address in self.owned
        return address.to_bytes(8, "little")

    def open(self, exported: bytes) -> int:
        address = int.from_bytes(exported, "little")
        self.opened.add(address)
        return address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def reach(self, address: int, size: int) -> int:
        assert address % 4096 == size % 4096 == 0
        assert address not in self.reached
        self.reached.add(address)
        return address

    def forget(self, address: int) -> None:
        self.reached.remove(address)

    def copy_now(self, target: int, source: int, size: int) -> None:
        self.log.append(("copy", size))
        ctypes.memmove(target, source, size)

    def load_now(self, target: int, source: int, size: int) -> None:
        assert target % 16 == source % 16 == size % 64 == 0
        self.log.append(("load", size))
        ctypes.memmove(target, source, size)

    def write_now(self, address: int, number: int) -> None:
        self.log.append(("write", number))
        ctypes.c_uint32.from_address(address).value = number

    def write_beside(self, address: int, number: int) -> None:
        ctypes.c_uint32.from_address(address).value = number

    def wait_now(self, address: int, number: int) -> None:
        self.log.append(("wait", number))
        flag = ctypes.c_uint32.from_address(address)
        until_s = time.monotonic() + _LONGEST_S
        while flag.value < number:
            assert time.monotonic() < until_s
            time.sleep(0)

    def mark(self) -> Callable[[], bool]:
        return lambda: True
