"""Groups of processes of one host that reach each other's bytes in shared memory.

Counters are written behind the bytes that they stand for, and x86-64 shows writes to others in
their order; between both lies a call into the interpreter, so that no compiler moves them either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metainfer.comm.algorithms import Part
from metainfer.comm.group import GroupError, check_part
from metainfer.comm.shared_memory import Counters
from metainfer.comm.transport_group import TransportGroup
from metainfer.comm.watch import OPERATIONS, Watch
from metainfer.comm.world import CHANNEL_PIECE_BYTES, CHANNEL_PIECES, World, join
from metainfer.core.errors import MetainferError
from metainfer.plan.wires import PLAIN

_ROUND = 0  # counter of rounds begun
_CALL = 1  # and the next: what the rank is in, in even and in odd rounds
_PUT, _GOT = 64, 128  # counters for each member: pieces sent to it, and taken from it
_WORD_BYTES = 8
_OPERATION_SHIFT = 56


class Place:
    """One process's view of the memory of a world.

    Attributes:
        bytes: uint8, all of it.
        counters: all of it as counters.
        next_slot: that this rank has not used.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.bytes = torch.frombuffer(world.memory.view, dtype=torch.uint8)
        self.counters = Counters(world.memory)
        self.next_slot = 0


class HostTransport:
    """Rounds of one group in its slot (`algorithms.Transport`), and channels between two members.

    Attributes:
        call: the operation at hand and its bytes, which all members must agree on.
    """

    def __init__(
        self, place: Place, watch: Watch, members: Sequence[int], rank: int, slot: int
    ) -> None:
        self.rank, self.size = rank, len(members)
        self.piece_bytes, self.channel_bytes = place.world.piece_bytes, CHANNEL_PIECE_BYTES
        self._place, self._watch, self._members, self._slot = place, watch, members, slot
        self._first = [place.world.counters_at(m, slot) // _WORD_BYTES for m in members]
        self._round = 0
        self._readers: list[Sequence[int]] = [(), ()]  # of what lies in each half
        self.call = 0

    def post(self, parts: Sequence[Part], readers: Sequence[int] | None = None) -> None:
        number = self._round + 1
        self._wait(self._readers[number % 2], self._round)
        self._readers[number % 2] = range(self.size) if readers is None else readers
        base = self._place.world.half_at(self._members[self.rank], self._slot, number)
        for begin, part in parts:
            if begin + len(part) > self.piece_bytes:
                raise MetainferError(f"a piece of {begin + len(part)} bytes is too large")
            self._place.bytes[base + begin : base + begin + len(part)].copy_(part)
        first = self._first[self.rank]
        self._place.counters[first + _CALL + number % 2] = self.call
        self._place.counters[first + _ROUND] = number
        self._round = number

    def fetch(self, rank: int, begin: int, length: int) -> torch.Tensor:
        self._wait((rank,), self._round)
        call = self._place.counters[self._first[rank] + _CALL + self._round % 2]
        if call != self.call:
            raise GroupError(
                f"rank {self._members[self.rank]} is in {_name(self.call)}, rank"
                f" {self._members[rank]} in {_name(call)}"
            )
        base = self._place.world.half_at(self._members[rank], self._slot, self._round) + begin
        return self._place.bytes[base : base + length]

    def _wait(self, ranks: Sequence[int], number: int) -> None:
        """Until all `ranks` have begun round `number`."""
        counters, first = self._place.counters, self._first

        def behind() -> list[int]:
            return [rank for rank in ranks if counters[first[rank] + _ROUND] < number]

        self._watch.until(lambda: not behind(), lambda: [self._members[rank] for rank in behind()])

    def put(self, to: int, piece: torch.Tensor) -> None:
        """Into the channel to a member, when there is room."""
        counters, world = self._place.counters, self._place.world
        put, got = self._first[self.rank] + _PUT + to, self._first[to] + _GOT + self.rank
        number = counters[put]
        self._watch.until(
            lambda: number - counters[got] < CHANNEL_PIECES, lambda: [self._members[to]]
        )
        base = world.channel_at(self._members[self.rank], self._slot, to, number)
        self._place.bytes[base : base + len(piece)].copy_(piece)
        counters[put] = number + 1

    def take(self, sender: int, piece: torch.Tensor) -> None:
        """Out of the channel from a member, when something is there."""
        counters, world = self._place.counters, self._place.world
        put, got = self._first[sender] + _PUT + self.rank, self._first[self.rank] + _GOT + sender
        number = counters[got]
        self._watch.until(lambda: counters[put] > number, lambda: [self._members[sender]])
        base = world.channel_at(self._members[sender], self._slot, self.rank, number)
        piece.copy_(self._place.bytes[base : base + len(piece)])
        counters[got] = number + 1


class HostMemoryGroup(TransportGroup):
    """A group of tensors on the CPU; see `join_host_memory`.

    Attributes:
        place: this process's view of the world.
    """

    _transport: HostTransport

    def __init__(
        self, place: Place, watch: Watch, members: Sequence[int], rank: int, slot: int,
        wire: str,
    ) -> None:  # fmt: skip
        transport = HostTransport(place, watch, members, rank, slot)
        super().__init__(members, rank, watch, transport, wire)
        self.place, self._slot = place, slot

    def _begin(self, operation: str, size: int) -> None:
        self._transport.call = OPERATIONS.index(operation) << _OPERATION_SHIFT | size

    def meet(self) -> None:
        """Until all members have come: a round without bytes."""
        with self._during("other work", 0):
            self._transport.post([])
            for rank in range(self.size):
                self._transport.fetch(rank, 0, 0)

    def neighbour(self, size: int) -> torch.Tensor:
        """uint8 [size], of the memory of the next rank as it lies there, for measuring."""
        other = self.members[(self.rank + 1) % self.size]
        begin = self.place.world.half_at(other, self._slot, 0)
        return self.place.bytes[begin : begin + min(size, self.place.world.piece_bytes)]

    def part(self, ranks: Sequence[int]) -> HostMemoryGroup:
        rank = check_part(ranks, self)
        slot = self.claim_slot(ranks)
        members = [self.members[member] for member in ranks]
        return HostMemoryGroup(self.place, self._watch, members, rank, slot, self.wire)

    def claim_slot(self, ranks: Sequence[int]) -> int:
        """One that no member of the part of `ranks` has used. All ranks call it."""
        with self._during("part", 0):
            free = self._all_numbers(self.place.next_slot)
        slot = max(free[member] for member in ranks)
        self.place.next_slot = slot + 1
        return slot

    def close(self) -> None:
        """Of the group of all ranks this ends the process's part in the world."""
        if not self._closed:
            self._closed = True
            if self._slot == 0:
                self._watch.leave()


def join_host_memory(
    world: World,
    rank: int,
    *,
    watch: Watch | None = None,
    wire: str = PLAIN,
) -> HostMemoryGroup:
    """The group of all ranks, once all are there. Raises GroupError.

    Args:
        watch: of this rank, where it has joined already; None to join now.
        wire: of sums of prefill, one of `plan.wires.WIRES`.
    """
    watch = watch or join(world, rank)
    place = Place(world)
    place.next_slot = 1
    return HostMemoryGroup(place, watch, range(world.size), rank, 0, wire)


def _name(call: int) -> str:
    size = call & ((1 << _OPERATION_SHIFT) - 1)
    return f"{OPERATIONS[call >> _OPERATION_SHIFT]} of {size} bytes"
