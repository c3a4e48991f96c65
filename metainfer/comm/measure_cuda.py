"""What a GPU can do in trials: areas that other processes open, kernels, copy engines, streams."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from metainfer.comm.measure_ways import HOST, RECEIVE, SEND, Place, Started
from metainfer.comm.move_kernel import Address, start_move
from metainfer.comm.peer_driver import PeerDriver
from metainfer.core.errors import MetainferError
from metainfer.kernels.triton.launch import JitLauncher

_HELD_CYCLES_PER_S = 2.0e9  # of clocks up to 2 GHz: slower ones hold longer
_QUEUED_S = 60e-6  # in which the host puts one piece of work into a queue
_LONGEST_HELD_S = 0.05


class CudaEngine:
    """The GPU of one rank (`measure_ways.Engine`)."""

    device = "cuda"
    collectives = "nccl"

    def __init__(self, place: Place) -> None:
        """Raises MetainferError where this process cannot use the GPU."""
        if not torch.cuda.is_available():
            raise MetainferError("torch sees no GPU")
        self._driver = PeerDriver()
        number = self._driver.device_of(place.bus_id) if place.bus_id else place.rank
        torch.cuda.set_device(number)
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context
        self._launch = JitLauncher()
        self._views: list[Any] = []
        self._areas: dict[str, torch.Tensor] = {}
        self._addresses: dict[tuple[str, int | None], int] = {}
        for name in (SEND, RECEIVE):
            address = self._driver.allocate(place.area_bytes)
            self._addresses[name, None] = address
            words = torch.as_tensor(_Words(address, place.area_bytes // 4), device="cuda")
            if words.data_ptr() != address:
                raise MetainferError("torch copies device memory where it was to take it over")
            self._areas[name] = words
        self._addresses[HOST, None] = self._pinned(mmap.mmap(-1, place.area_bytes))
        self._stage = self._pinned(place.stages.view) if place.ranks > 1 else 0
        self._lanes: list[torch.cuda.Stream] = []

    def _pinned(self, memory: mmap.mmap) -> int:
        """Address of host memory, which is there for as long as the process."""
        view = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
        self._views.append(view)
        self._driver.register_host(ctypes.addressof(view), len(memory))
        return ctypes.addressof(view)

    def area(self, name: str) -> torch.Tensor:
        return self._areas[name]

    def export(self) -> Any:
        return [self._driver.export(self._addresses[name, None]) for name in (SEND, RECEIVE)]

    def open(self, rank: int, exported: Any) -> None:
        for name, handle in zip((SEND, RECEIVE), exported, strict=True):
            self._addresses[name, rank] = self._driver.open(handle)

    def address(self, name: str, rank: int | None = None) -> int:
        return self._addresses[name, rank]

    def stage(self) -> int:
        return self._stage

    def by_kernel(self, target: int, source: int, size: int, lanes: int) -> None:
        start_move(self._launch, Address(target), Address(source), size, lanes)

    def by_copy_engine(self, target: int, source: int, size: int) -> None:
        self._driver.copy(target, source, size, torch.cuda.current_stream().cuda_stream)

    def mark(self, lane: int, work: Started) -> Callable[[], bool]:
        with torch.cuda.stream(self._lane(lane)):
            work()
            done = torch.cuda.Event()
            done.record()
        return done.query

    def seconds(self, works: Sequence[Started], calls: int) -> float:
        """By the device's own clock, held back until the host has queued all."""
        main = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        held_s = min(_QUEUED_S * calls * len(works) + 50e-6, _LONGEST_HELD_S)
        torch.cuda._sleep(int(held_s * _HELD_CYCLES_PER_S))
        begin.record(main)
        lanes = [main] if len(works) == 1 else [self._lane(n) for n in range(len(works))]
        for lane in lanes:
            lane.wait_event(begin)
        for _ in range(calls):
            for lane, work in zip(lanes, works, strict=True):
                with torch.cuda.stream(lane):
                    work()
        for lane in lanes:
            main.wait_stream(lane)
        end.record(main)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def wait(self) -> None:
        torch.cuda.synchronize()

    def _lane(self, number: int) -> torch.cuda.Stream:
        while len(self._lanes) <= number:
            self._lanes.append(torch.cuda.Stream())
        return self._lanes[number]


class _Words:
    """Device memory as torch takes it over: int32 [words]."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (words,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
