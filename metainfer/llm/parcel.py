"""Numbers on their way between host and device, without anybody waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNED = 16
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def send(device: torch.device, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The arrays (int64 or float32) on the device, by one copy. They may be changed afterwards."""
    if device.type == "cpu":
        return [torch.tensor(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNED) * _ALIGNED)
    # Memory that is freed before it was copied is kept until then, by torch's allocator.
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for start, array in zip(starts, arrays, strict=False):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = host.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


class Given:
    """A tensor that is being copied to the host."""

    def __init__(self, host: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._host = host
        self._ready = ready

    def wait(self) -> torch.Tensor:
        """The copy, once it is complete."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host


def fetch(tensor: torch.Tensor) -> Given:
    """Start to copy `tensor` to the host, after what is queued in the current stream. One without
    numbers stays where it is."""
    if tensor.device.type in ("cpu", "meta"):
        return Given(tensor, None)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(tensor.device))
    return Given(host, ready)
