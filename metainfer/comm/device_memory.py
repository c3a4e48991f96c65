"""Groups of GPUs: bytes lie in each GPU's own memory, which peers open, or in host memory that all
GPUs reach; copy engines or kernels move them.

All is queued in the current stream. Flags are numbers in shared host memory that streams write and
wait for, so that the processor sees how far each rank is, names a late one, and frees streams that
wait for a rank that has ended. Graphs may hold sums of few rows, which one kernel makes
(`one_shot`); in all else halves take turns as the host counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from metainfer.comm.algorithms import Part
from metainfer.comm.group import GroupError
from metainfer.comm.host_memory import HostMemoryGroup, join_host_memory
from metainfer.comm.one_shot import OneShot
from metainfer.comm.queue import Queue
from metainfer.comm.transport_group import TransportGroup
from metainfer.comm.watch import Watch, Watchdog
from metainfer.comm.world import CHANNEL_PIECE_BYTES, CHANNEL_PIECES, World, join
from metainfer.core.errors import MetainferError
from metainfer.hardware.curves import COPY, LOAD, STAGED, STORE
from metainfer.kernels.triton.launch import Launcher
from metainfer.plan.routes import DECODE
from metainfer.plan.wires import PLAIN

T = TypeVar("T")

MEANS = (COPY, LOAD, STAGED)
"""A peer's memory read by the copy engine or by a kernel; or host memory, by the copy engine."""

_ROUND, _PUT, _GOT = 0, 64, 128  # counters, as of `host_memory`
_WORD_BYTES = 8
_ALIGNED, _GRAIN = 16, 64  # bytes, of what a kernel copies
_FREED = 2**30  # a number that no counter reaches, for which every wait ends


@dataclass(frozen=True, slots=True)
class Rows:
    """How sums of rows of decode are made: in one kernel that stores into peers' memory, or loads
    from there.

    Attributes:
        means: `STORE` or `LOAD`.
        launch: starts the kernel.
    """

    means: str
    launch: Launcher

    def of(self, queue: Queue, host: HostMemoryGroup, deadline_s: float) -> OneShot:
        push = self.means == STORE
        return OneShot(queue, self.launch, host, push=push, deadline_s=deadline_s)


class DeviceTransport:
    """Rounds and channels of one group of GPUs (`transport_group.Channels`)."""

    def __init__(self, queue: Queue, host: HostMemoryGroup, slot: int, means: str) -> None:
        """
        Args:
            host: the same members, for objects.
            slot: for this transport alone, the same at all members.
            means: one of `MEANS`.
        """
        world = host.place.world
        self.rank, self.size = host.rank, host.size
        self.piece_bytes, self.channel_bytes = world.piece_bytes, CHANNEL_PIECE_BYTES
        self._queue, self._world, self._place = queue, world, host.place
        self._members, self._slot, self._means = host.members, slot, means
        self._base = ctypes.addressof(ctypes.c_ubyte.from_buffer(world.memory.view))
        self._slots = [
            queue.reach(self._base + world.counters_at(member, slot), world.slot_bytes)
            for member in self._members
        ]
        self._opened: list[int] = []
        self._owned = 0
        self._halves = self._own_halves(host)
        self._round = 0
        self._readers: list[Sequence[int]] = [(), ()]  # of what lies in each half
        self._seen = [0] * self.size  # rounds that the queue has waited for
        self._put, self._got = [0] * self.size, [0] * self.size

    def _own_halves(self, host: HostMemoryGroup) -> list[int]:
        """Where the halves of each member begin."""
        if self._means == STAGED:
            return [self._at(r, self._world.half_at(m, self._slot, 0))
                    for r, m in enumerate(self._members)]  # fmt: skip
        self._owned = self._queue.allocate(2 * self.piece_bytes)
        handles = host.broadcast(host.gather(self._queue.export(self._owned)))
        assert handles is not None
        halves = []
        for rank, handle in enumerate(handles):
            if rank != self.rank:
                self._opened.append(self._queue.open(handle))
            halves.append(self._owned if rank == self.rank else self._opened[-1])
        return halves

    def _at(self, rank: int, place: int) -> int:
        """Where the GPU finds a byte of the world's memory that lies in a member's slot."""
        begin = self._world.counters_at(self._members[rank], self._slot)
        return self._slots[rank] + place - begin

    def post(self, parts: Sequence[Part], readers: Sequence[int] | None = None) -> None:
        number = self._round + 1
        for rank in self._readers[number % 2]:
            self._wait(rank, self._round)
        self._readers[number % 2] = range(self.size) if readers is None else readers
        base = self._half(self.rank, number)
        for begin, part in parts:
            if begin + len(part) > self.piece_bytes:
                raise MetainferError(f"a piece of {begin + len(part)} bytes is too large")
            self._copy(base + begin, part.data_ptr(), len(part))
        self._queue.write_now(self._flag(self.rank, _ROUND), number)
        self._round = number

    def fetch(self, rank: int, begin: int, length: int) -> torch.Tensor:
        self._wait(rank, self._round)
        found = torch.empty(length, dtype=torch.uint8, device=self._queue.device)
        source, target = self._half(rank, self._round) + begin, found.data_ptr()
        by_kernel = 0  # bytes of them
        if self._means == LOAD and source % _ALIGNED == 0:
            by_kernel = length - length % _GRAIN
        if by_kernel:
            self._queue.load_now(target, source, by_kernel)
        self._copy(target + by_kernel, source + by_kernel, length - by_kernel)
        return found

    def put(self, to: int, piece: torch.Tensor) -> None:
        """By way of host memory."""
        number = self._put[to]
        self._queue.wait_now(self._flag(to, _GOT + self.rank), max(0, number - CHANNEL_PIECES + 1))
        place = self._world.channel_at(self._members[self.rank], self._slot, to, number)
        self._copy(self._at(self.rank, place), piece.data_ptr(), len(piece))
        self._put[to] = number + 1
        self._queue.write_now(self._flag(self.rank, _PUT + to), number + 1)

    def take(self, sender: int, piece: torch.Tensor) -> None:
        number = self._got[sender]
        self._queue.wait_now(self._flag(sender, _PUT + self.rank), number + 1)
        place = self._world.channel_at(self._members[sender], self._slot, self.rank, number)
        self._copy(piece.data_ptr(), self._at(sender, place), len(piece))
        self._got[sender] = number + 1
        self._queue.write_now(self._flag(self.rank, _GOT + sender), number + 1)

    def _half(self, rank: int, number: int) -> int:
        return self._halves[rank] + number % 2 * self.piece_bytes

    def _wait(self, rank: int, number: int) -> None:
        """Until a member has begun round `number`."""
        if rank != self.rank and self._seen[rank] < number:
            self._queue.wait_now(self._flag(rank, _ROUND), number)
            self._seen[rank] = number

    def _flag(self, rank: int, word: int) -> int:
        return self._slots[rank] + word * _WORD_BYTES

    def _copy(self, target: int, source: int, size: int) -> None:
        if size:
            self._queue.copy_now(target, source, size)

    def behind(self) -> list[int]:
        """Members that have begun fewer rounds than others; all others where none has."""
        rounds = [self._place.counters[self._counter(m) + _ROUND] for m in self._members]
        late = [m for m, number in zip(self._members, rounds, strict=True) if number < max(rounds)]
        return late or [m for rank, m in enumerate(self._members) if rank != self.rank]

    def let_go(self) -> None:
        """End all waits for members, by the host. The transport is of no more use."""
        for member in self._members:
            for word in range(_GOT + self.size):
                self._place.counters[self._counter(member) + word] = _FREED

    def _counter(self, member: int) -> int:
        return self._world.counters_at(member, self._slot) // _WORD_BYTES

    def close(self, meet: Callable[[], None]) -> None:
        """Once all is done here. `meet`: until all members have come."""
        for address in self._opened:
            self._queue.close(address)
        meet()  # nobody has this rank's memory open now
        if self._owned:
            self._queue.free(self._owned)
        for member in self._members:
            self._queue.forget(self._base + self._world.counters_at(member, self._slot))


class DeviceGroup(TransportGroup):
    """A group of tensors on GPUs; see `join_devices`. Operations are queued: what they give is
    there for what is queued behind them, and `settle` waits for it."""

    _transport: DeviceTransport

    def __init__(
        self, queue: Queue, host: HostMemoryGroup, watch: Watch, means: str, wire: str,
        rows: Rows | None,
    ) -> None:  # fmt: skip
        """`host`: of this group alone."""
        transport = DeviceTransport(queue, host, host.claim_slot(range(host.size)), means)
        super().__init__(host.members, host.rank, watch, transport, wire)
        self.device = queue.device
        self._queue, self._host, self._means = queue, host, means
        self._parts: list[DeviceGroup] = []
        self._rows_by = rows
        self._rows = None if rows is None else rows.of(queue, host, watch.deadline_s)
        self._dog = Watchdog(watch, lambda error: self._let_go())

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        """Small ones of decode in one kernel, which graphs may hold, where the group was joined
        so."""
        if self._rows is None or phase != DECODE or not self._rows.takes(partial):
            return super().all_reduce(partial, phase)
        with self._during("all_reduce", partial.nbytes):
            return self._rows.all_reduce(partial)

    def _let_go(self) -> None:
        """End what this rank's queue waits for."""
        self._transport.let_go()
        if self._rows is not None:
            self._rows.let_go()

    def settle(self) -> None:
        """Until all that was queued is done. Raises GroupError: a rank did not come in time, has
        ended or has given up."""
        done = self._queue.mark()
        try:
            with self._during("other work", 0):
                self._watch.until(done, self._transport.behind)
                self._watch.check()  # where waits were let go, what came is worth nothing
                if self._rows is not None:
                    self._rows.check()
        except GroupError:
            self._let_go()
            raise

    def gather(self, value: T) -> list[T] | None:
        return self._host.gather(value)

    def broadcast(self, value: T) -> T:
        return self._host.broadcast(value)

    def part(self, ranks: Sequence[int]) -> DeviceGroup:
        host = self._host.part(ranks)
        made = DeviceGroup(self._queue, host, self._watch, self._means, self.wire, self._rows_by)
        self._parts.append(made)
        return made

    def close(self) -> None:
        """Parts too. The group of all ranks takes the process out of the world."""
        if self._closed:
            return
        for part in self._parts:
            part.close()
        try:
            self.settle()
            if self._rows is not None:
                self._rows.close()
            self._transport.close(lambda: self._host.broadcast(None))
        except GroupError:
            pass  # the process ends, and with it what others may still have open
        self._closed = True
        self._dog.end()
        self._host.close()


def join_devices(
    world: World,
    rank: int,
    queue: Queue,
    means: str,
    *,
    watch: Watch | None = None,
    wire: str = PLAIN,
    rows: Rows | None = None,
) -> DeviceGroup:
    """The group of all ranks, each with a GPU, once all are there.

    Args:
        means: how bytes come from a peer, one of `MEANS`.
        watch: of this rank, where it has joined already; None to join now.
        wire: as of `join_host_memory`.
        rows: how sums of rows of decode are made; None for as all others.

    Raises:
        GroupError: a rank did not come.
        MetainferError: a GPU does not reach another's memory.
    """
    if means not in MEANS:
        raise MetainferError(f"there is no means {means}, only {', '.join(MEANS)}")
    watch = watch or join(world, rank)
    host = join_host_memory(world, rank, watch=watch)
    return DeviceGroup(queue, host, watch, means, wire, rows)
