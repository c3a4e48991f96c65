"""The queue of one GPU: the current stream of this process (`queue.Queue`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from metainfer.comm.move_kernel import Address, start_move
from metainfer.comm.peer_driver import PeerDriver
from metainfer.kernels.triton.launch import JitLauncher


class CudaQueue:
    """Of the current GPU."""

    def __init__(self) -> None:
        """Raises MetainferError where there is no driver."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self.device)  # makes the context, which the driver's calls need
        self._driver = PeerDriver()
        self._launch = JitLauncher()
        self._beside = torch.cuda.Stream(self.device)

    def allocate(self, size: int) -> int:
        return self._driver.allocate(size)

    def free(self, address: int) -> None:
        self._driver.free(address)

    def export(self, address: int) -> bytes:
        return self._driver.export(address)

    def open(self, exported: bytes) -> int:
        return self._driver.open(exported)

    def close(self, address: int) -> None:
        self._driver.close(address)

    def reach(self, address: int, size: int) -> int:
        self._driver.register_host(address, size)
        return self._driver.device_address(address)

    def forget(self, address: int) -> None:
        self._driver.unregister_host(address)

    def copy_now(self, target: int, source: int, size: int) -> None:
        self._driver.copy(target, source, size, self._stream())

    def load_now(self, target: int, source: int, size: int) -> None:
        start_move(self._launch, Address(target), Address(source), size)

    def write_now(self, address: int, number: int) -> None:
        self._driver.queue_write(address, number, self._stream())

    def write_beside(self, address: int, number: int) -> None:
        self._driver.queue_write(address, number, self._beside.cuda_stream)

    def wait_now(self, address: int, number: int) -> None:
        self._driver.queue_wait(address, number, self._stream())

    def mark(self) -> Callable[[], bool]:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return done.query

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream
