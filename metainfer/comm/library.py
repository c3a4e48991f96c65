"""Groups that torch.distributed moves bytes for: gloo between CPUs, NCCL between GPUs.

What the library sums itself may depend on how it divides the work; `own_sums` lets it only move
bytes, so that sums are those of every other group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from metainfer.comm.group import GroupError, check_part, share_rows, sum_in_order
from metainfer.comm.process_group import ProcessGroup
from metainfer.comm.watch import Watch, Watchdog
from metainfer.comm.wire import Wire, wire_of
from metainfer.comm.world import World, join
from metainfer.core.errors import MetainferError
from metainfer.plan.foretold import GATHERED_UP_TO_BYTES
from metainfer.plan.routes import DECODE, PREFILL
from metainfer.plan.wires import PLAIN

GLOO, NCCL = "gloo", "nccl"
_LOOPBACK = "127.0.0.1"
_CAUSE_S = 1.0  # for the end of a process to be seen behind the error that it made


class LibraryGroup(ProcessGroup):
    """See `join_library`."""

    def __init__(
        self,
        world: World,
        watch: Watch,
        members: Sequence[int],
        rank: int,
        key: str,
        library: str,
        own_sums: bool,
        wire: str,
    ) -> None:
        """`key`: where the members meet, the same at all of them and used once."""
        super().__init__(members, rank, watch)
        self._world, self._key, self._library = world, key, library
        self._own_sums, self.wire = own_sums, wire
        self._parts: list[LibraryGroup] = []
        self._sent: list[_Waited] = []
        if library == NCCL:
            self.device = torch.device("cuda", torch.cuda.current_device())
        with self._during("joining", 0):
            self._moves = self._meet()
        if library == NCCL:  # its kernels wait without a bound
            self._dog = Watchdog(watch, lambda error: self._moves.abort())

    def _meet(self) -> Any:
        """The library's own group. It is made in a thread, since making it waits for the others."""
        made: list[Any] = []

        def make() -> None:
            try:
                made.append(_make(self._library, self._world, self._key, self.rank, self.size))
            except RuntimeError as error:
                made.append(error)

        threading.Thread(target=make, name=f"joining {self._key}", daemon=True).start()
        self._watch.until(lambda: bool(made), self._late)
        if isinstance(made[0], RuntimeError):
            raise self._cause(made[0])
        return made[0]

    @contextmanager
    def _during(self, operation: str, size: int) -> Iterator[None]:
        """The library may fail where work is given to it, too."""
        with super()._during(operation, size):
            try:
                yield
            except RuntimeError as error:
                raise self._cause(error) from error

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self.all_reduce_by(self._own_sums, partial, self._wire_in(phase))

    def _wire_in(self, phase: str) -> str:
        return self.wire if phase == PREFILL else PLAIN

    def all_reduce_by(
        self, own_sums: bool, partial: torch.Tensor, wire: str = PLAIN
    ) -> torch.Tensor:
        """As `join_library` says."""
        form = wire_of(wire, partial)
        partial = partial.contiguous()
        with self._during("all_reduce", partial.nbytes):
            if not own_sums and wire == PLAIN:
                self._wait(self._moves.allreduce([partial]))
                return partial
            if partial.nbytes <= GATHERED_UP_TO_BYTES:
                return self._sum_of_all(partial, form)
            return self._sum_of_parts(partial, form)

    def _sum_of_all(self, partial: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Everybody gathers and sums all."""
        own = wire.encode(partial.view(-1))
        coded_SB = self._gathered(own).view(self.size, len(own))
        total = wire.decode(wire.encode(_summed(coded_SB, wire)))  # as of parts, which are sent
        return total.to(partial.dtype).view(partial.shape)

    def _sum_of_parts(self, partial: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Everybody sums a part, and the sums are gathered."""
        count = partial.numel()
        each = -(-count // (self.size * wire.unit)) * wire.unit
        padded = torch.nn.functional.pad(partial.view(-1), (0, each * self.size - count))
        reduced = wire.encode(self._own_part(padded, wire))
        sums = wire.decode(self._gathered(reduced))[:count]
        return sums.to(partial.dtype).view(partial.shape)

    def _own_part(self, flat_N: torch.Tensor, wire: Wire) -> torch.Tensor:
        """The sum over ranks, still wide, of this rank's equal part of what all have."""
        coded = wire.encode(flat_N)
        found = torch.empty_like(coded)
        self._wait(self._moves.alltoall_base(found, coded, [], []))
        return _summed(found.view(self.size, len(coded) // self.size), wire)

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        part_N = part_N.contiguous()
        with self._during("all_gather", part_N.nbytes):
            found = self._gathered(part_N.view(-1).view(torch.uint8))
        return found.view(part_N.dtype).view(self.size * len(part_N), *part_N.shape[1:])

    def _gathered(self, own_B: torch.Tensor) -> torch.Tensor:
        """uint8 [size * bytes]."""
        found = own_B.new_empty(self.size * len(own_B))
        if len(own_B):
            self._wait(self._moves._allgather_base(found, own_B))
        return found

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self.reduce_scatter_by(self._own_sums, partial_N, self._wire_in(phase))

    def reduce_scatter_by(
        self, own_sums: bool, partial_N: torch.Tensor, wire: str = PLAIN
    ) -> torch.Tensor:
        """As `join_library` says."""
        rows = share_rows(len(partial_N), self.size)
        form = wire_of(wire, partial_N)
        partial_N = partial_N.contiguous()
        with self._during("reduce_scatter", partial_N.nbytes):
            if own_sums or wire != PLAIN:
                total = self._own_part(partial_N.view(-1), form)
                return total.to(partial_N.dtype).view(rows, *partial_N.shape[1:])
            found = partial_N.new_empty(rows, *partial_N.shape[1:])
            work = self._moves._reduce_scatter_base(found, partial_N)
            self._wait(_Waited(work, found) if self.device.type == "cpu" else work)
            return found

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        share_rows(len(parts_N), self.size)
        parts_N = parts_N.contiguous()
        found = torch.empty_like(parts_N)
        with self._during("all_to_all", parts_N.nbytes):
            ways = (found.view(-1).view(torch.uint8), parts_N.view(-1).view(torch.uint8))
            self._wait(self._moves.alltoall_base(*ways, [], []))
        return found

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Between GPUs a group's ranks must not all send first: a stream sends one at a time."""
        with self._during("send", tensor.nbytes):
            if self.device.type == "cpu":
                own = tensor.clone(memory_format=torch.contiguous_format).view(-1)
                work = _Waited(self._moves.send([own.view(torch.uint8)], to, 0), own)
                self._sent = [sent for sent in self._sent if not sent.is_completed()]
                self._sent.append(work)
            else:
                own = tensor.contiguous().view(-1)
                self._wait(self._moves.send([own.view(torch.uint8)], to, 0))

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        found = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        with self._during("receive", found.nbytes):
            work = self._moves.recv([found.view(-1).view(torch.uint8)], sender, 0)
            self._wait(_Waited(work, found) if self.device.type == "cpu" else work, [sender])
        return found

    def part(self, ranks: Sequence[int]) -> LibraryGroup:
        rank = check_part(ranks, self)
        members = [self.members[member] for member in ranks]
        key = f"{self._key}/{len(self._parts)}-{'-'.join(map(str, members))}"
        made = LibraryGroup(
            self._world, self._watch, members, rank, key, self._library, self._own_sums, self.wire
        )
        self._parts.append(made)
        return made

    def close(self) -> None:
        """Parts too. The group of all ranks takes the process out of the world."""
        if self._closed:
            return
        with suppress(GroupError), self._during("send", 0):
            for work in self._sent:
                self._wait(work)
        self._closed = True
        for part in self._parts:
            part.close()
        if self._library == NCCL:
            self._dog.end()
        self._moves = None  # what others have not read yet still comes to them
        if "/" not in self._key:
            self._watch.leave()

    def _wait(self, work: Any, ranks: Sequence[int] | None = None) -> None:
        """Until the library has done its work; on a GPU, so far as the current stream sees."""
        if self.device.type == "cpu":
            late = self._late if ranks is None else lambda: [self.members[r] for r in ranks]
            try:
                self._watch.until(work.is_completed, late)
            except GroupError:
                with suppress(RuntimeError):
                    self._moves.abort()
                raise
        work.wait()

    def _late(self) -> list[int]:
        return self._watch.elsewhere(self.members)

    def _cause(self, error: RuntimeError) -> GroupError:
        """Why the library failed: as a rule, another process has ended."""
        until_s = time.monotonic() + _CAUSE_S
        while time.monotonic() < until_s:
            try:
                self._watch.check()
            except GroupError as cause:
                return cause
            time.sleep(0.01)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return GroupError(f"{self._library} failed at rank {self._watch.rank}: {lines[0][:200]}")


class _Waited:
    """Work of gloo that says only to who waits for it that it is done."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        """`tensor`: which must stay until then."""
        self._work, self._tensor = work, tensor
        self._error: RuntimeError | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="gloo", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error:
            raise self._error


def join_library(
    world: World,
    rank: int,
    library: str,
    *,
    watch: Watch | None = None,
    own_sums: bool = True,
    wire: str = PLAIN,
) -> LibraryGroup:
    """The group of all ranks, once all are there. Raises GroupError.

    Args:
        library: `GLOO`, or `NCCL` on the process's current GPU.
        watch: of this rank, where it has joined already; None to join now.
        own_sums: sums are made here, in the order of ranks; else as the library makes them, which
            are the same on all ranks too. What travels in 8 bits is always summed here.
        wire: of sums of prefill, one of `plan.wires.WIRES`.
    """
    if not dist.is_available():
        raise MetainferError("this torch has no torch.distributed")
    watch = watch or join(world, rank)
    return LibraryGroup(world, watch, range(world.size), rank, library, library, own_sums, wire)


def _make(library: str, world: World, key: str, rank: int, size: int) -> Any:
    store = dist.PrefixStore(key, dist.FileStore(str(world.folder / "library"), world.size))
    timeout = timedelta(seconds=world.deadline_s)
    if library == GLOO:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        return dist.ProcessGroupGloo(store, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _summed(coded_SB: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The sum of what all ranks coded, rounded nowhere."""
    first, *others = (wire.decode(part_B) for part_B in coded_SB)
    return sum_in_order([first.to(wire.wide), *others])
