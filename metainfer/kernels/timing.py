"""How long calls take on a device, and what the device reaches in plain work.

Calls are timed in series over different inputs, so that none finds its own in a cache that the
last one filled. On a GPU the series is held back until the host has queued all of it: what is
measured is the device's time, as in a recorded graph, not the time to launch from Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metainfer.ops.floor import Rates

Timed = Callable[[], Any]
_HELD_CYCLES_PER_S = 2.0e9  # of clocks up to 2 GHz: slower ones hold longer
_LONGEST_HELD_S = 0.05
_REPLAY_HELD_S = 1e-4  # while the host queues a graph
_COPY_BYTES = 2**29
_PRODUCT = 8192
_CPU_COPY_BYTES = 2**26
_CPU_PRODUCT = 1024


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls on one kind of device ("cpu" or "cuda")."""

    device: str

    def warm(self, calls: Sequence[Timed]) -> float:
        """Run a series twice, compiling what needs to be, and return for how many seconds the
        device must be held while the host queues a series."""
        for call in calls:
            call()
        self.wait()
        began = time.perf_counter()
        for call in calls:
            call()
        queued_s = time.perf_counter() - began
        self.wait()
        return min(1.5 * queued_s + 20e-6, _LONGEST_HELD_S)

    def series_s(self, calls: Sequence[Timed], held_s: float) -> float:
        """Seconds of one call, of a series once through."""
        if self.device != "cuda":
            return _host_s(calls)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(held_s * _HELD_CYCLES_PER_S))
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(calls)

    def recorded(self, calls: Sequence[Timed]) -> Timed | None:
        """What replays a series as a CUDA graph; None on a CPU, and where it cannot be captured.
        The series was run before."""
        if self.device != "cuda":
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError:  # a call that waits for the device, among other things
            torch.cuda.synchronize()
            return None
        return graph.replay

    def replay_s(self, replay: Timed, count: int) -> float:
        """Seconds of one call of a recorded series of `count`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(_REPLAY_HELD_S * _HELD_CYCLES_PER_S))
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    def median_s(self, calls: Sequence[Timed], budget_s: float = 0.1, least: int = 3) -> float:
        """Median over as many series as the budget allows, at least `least`."""
        held_s = self.warm(calls)
        found: list[float] = []
        until = time.perf_counter() + budget_s
        while len(found) < least or (time.perf_counter() < until and len(found) < 100):
            found.append(self.series_s(calls, held_s))
        return statistics.median(found)

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def _host_s(calls: Sequence[Timed]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def measure_rates(device: str) -> Rates:
    """Copies and products of this device, by what comes with torch: the rates that floors are
    counted with. Takes about a second on a GPU."""
    watch = Stopwatch(device)
    gpu = device == "cuda"
    small = torch.zeros(1, device=device)
    launch_s = watch.median_s([small.zero_] * 64)
    flops = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        flops[name] = _product_rate(watch, _PRODUCT if gpu else _CPU_PRODUCT, dtype)
    if gpu and torch.cuda.get_device_capability() >= (8, 9):
        flops["fp8"] = _fp8_rate(watch)
    return Rates(_copy_rate(watch, _COPY_BYTES if gpu else _CPU_COPY_BYTES), flops, launch_s)


def _copy_rate(watch: Stopwatch, size: int) -> float:
    one, other = (torch.zeros(size, dtype=torch.uint8, device=watch.device) for _ in range(2))
    return 2.0 * size / watch.median_s([lambda: one.copy_(other)])


def _product_rate(watch: Stopwatch, size: int, dtype: torch.dtype) -> float:
    one, other = (torch.randn(size, size, device=watch.device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / watch.median_s([lambda: one @ other.T])


def _fp8_rate(watch: Stopwatch) -> float:
    one, other = (
        torch.randn(_PRODUCT, _PRODUCT, device=watch.device).to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    scale = torch.ones((), device=watch.device)
    seconds = watch.median_s(
        [lambda: torch._scaled_mm(one, other.T, scale, scale, out_dtype=torch.bfloat16)]
    )
    return 2.0 * _PRODUCT**3 / seconds
