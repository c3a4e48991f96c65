"""One-shot sums of GPUs for rows of decode: areas that all ranks reach, and who was late."""

from __future__ import annotations

import ctypes

import torch

from metainfer.comm.group import Stalled
from metainfer.comm.host_memory import HostMemoryGroup
from metainfer.comm.one_shot_kernel import (
    ABORT,
    DATA_AT,
    LATE,
    MOST_RANKS,
    area_bytes,
    start_one_shot,
    state_at,
)
from metainfer.comm.queue import Queue
from metainfer.core.errors import MetainferError
from metainfer.kernels.triton.launch import Launcher
from metainfer.plan.foretold import ONE_KERNEL_BYTES

_LOOKS_PER_S = 1_000_000  # at a flag, at least
_MOST_LOOKS = 2**31 - 1
_DTYPES = (torch.bfloat16, torch.float32)


class OneShot:
    """Of one group; may be captured in graphs, and those replayed by all ranks in the same order.

    A sum for which a rank was late is wrong, and so are all behind it: `check` says so.
    """

    def __init__(
        self, queue: Queue, launch: Launcher, host: HostMemoryGroup, *, push: bool,
        deadline_s: float, slot_bytes: int = ONE_KERNEL_BYTES,
    ) -> None:  # fmt: skip
        """All members call it.

        Args:
            host: the same members, for objects.
            push: parts are stored into peers' memory, else loaded from there.
            slot_bytes: of the largest sum.
        """
        if host.size > MOST_RANKS:
            raise MetainferError(f"{host.size} ranks are more than {MOST_RANKS}, which have flags")
        self.slot_bytes = slot_bytes
        self._queue, self._launch, self._host, self._push = queue, launch, host, push
        self._longest = min(int(deadline_s * _LOOKS_PER_S), _MOST_LOOKS)
        self._own = queue.allocate(area_bytes(host.size, slot_bytes))
        self._nothing = (ctypes.c_ubyte * DATA_AT)()
        queue.copy_now(self._own, ctypes.addressof(self._nothing), DATA_AT)
        self._wait()
        handles = host.broadcast(host.gather(queue.export(self._own)))
        assert handles is not None
        self._opened = {r: queue.open(h) for r, h in enumerate(handles) if r != host.rank}
        areas = [self._opened.get(rank, self._own) for rank in range(host.size)]
        self._areas = torch.tensor(areas, dtype=torch.int64, device=queue.device)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it can be summed so."""
        return tensor.nbytes <= self.slot_bytes and tensor.dtype in _DTYPES and tensor.numel() > 0

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Overwrites `partial`, which `takes` said yes to, where it is contiguous."""
        partial = partial.contiguous()
        start_one_shot(
            self._launch, partial.view(-1), partial.view(-1), self._areas, self._host.rank,
            self._host.size, self.slot_bytes, push=self._push, longest=self._longest,
        )  # fmt: skip
        return partial

    def check(self) -> None:
        """Once the queue is done. Raises Stalled where a rank was late."""
        word = ctypes.c_uint32()
        self._queue.copy_now(ctypes.addressof(word), self._own + state_at(LATE), 4)
        self._wait()
        if word.value:
            late, own = self._host.members[word.value - 1], self._host.members[self._host.rank]
            raise Stalled(f"rank {own} waited in a one-shot sum for rank {late}")

    def let_go(self) -> None:
        """End all waits for peers, from any thread. Sums are wrong from then on."""
        self._queue.write_beside(self._own + state_at(ABORT), 1)

    def close(self) -> None:
        """By all members, once the queue is done."""
        for address in self._opened.values():
            self._queue.close(address)
        self._host.broadcast(None)  # nobody has this rank's area open now
        self._queue.free(self._own)

    def _wait(self) -> None:
        done = self._queue.mark()
        while not done():
            pass
