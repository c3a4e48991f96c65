"""Algorithms of collectives: who reads what of whom, and when, over any transport.

All of them give the same bits: sums are made in fp32 in the order of ranks and rounded once. A
transport moves in rounds. A round begins with what this rank posts, and ends where the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from metainfer.comm.group import share_rows
from metainfer.comm.wire import Plain, Wire

_RING_PIECES = 16
_RING_LEAST_BYTES = 64 * 1024  # of a piece of a ring

Part = tuple[int, torch.Tensor]
"""Where in a piece, and which bytes."""


class Transport(Protocol):
    """How the members of a group reach each other's bytes.

    Two halves take turns, one round each, and no barrier ends a round: a half is written again
    when all that read it have begun the round that follows, for which they had to be done reading.

    Attributes:
        piece_bytes: that a rank can post in a round.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def piece_bytes(self) -> int: ...

    def post(self, parts: Sequence[Part], readers: Sequence[int] | None = None) -> None:
        """Begin the next round with bytes of this rank.

        Args:
            readers: who may read these bytes; None for everybody.
        """

    def fetch(self, rank: int, begin: int, length: int) -> torch.Tensor:
        """uint8 [length]: of what `rank` posted in the round at hand, once it is there. To be used
        before the next post."""


AllReduce = Callable[[Transport, torch.Tensor, Wire], None]
"""Puts into a flat tensor the sum over ranks of what is there."""


def one_shot(transport: Transport, flat_N: torch.Tensor, wire: Wire) -> None:
    """Everybody reads all of everybody: one round, size - 1 times the bytes."""
    for begin, end in _pieces(len(flat_N), transport.piece_bytes, wire):
        own = wire.encode(flat_N[begin:end])
        transport.post([(0, own)])
        # Others would sum a part each and send it: so are the bits of a sum that nobody sends.
        total = wire.encode(_sum(transport, own, 0, len(own), wire))
        flat_N[begin:end] = wire.decode(total)


def two_shot(transport: Transport, flat_N: torch.Tensor, wire: Wire) -> None:
    """Everybody sums a part of all, and reads the sums of the others: two rounds."""
    size, rank = transport.size, transport.rank
    for begin, end in _pieces(len(flat_N), transport.piece_bytes, wire):
        bounds = _shares(end - begin, size, wire.unit)
        first, last = (_bytes(bound, wire) for bound in bounds[rank : rank + 2])
        own = wire.encode(flat_N[begin:end])
        transport.post([(0, own)])
        total = _sum(transport, own, first, last, wire)
        reduced = wire.encode(total)
        transport.post([(0, reduced)])
        for member in range(size):
            low, high = bounds[member : member + 2]
            found = _fetch(transport, member, reduced, 0, _bytes(high - low, wire))
            flat_N[begin + low : begin + high] = wire.decode(found)


def ring(transport: Transport, flat_N: torch.Tensor, wire: Wire) -> None:
    """Everybody reads of the one before it alone, two pieces in flight.

    Partial sums go from the first rank to the last, in fp32, and sums on from there around the
    ring, each a round behind. A ring in which each part begins at another rank would send less, but
    every part would be summed in another order.
    """
    size, rank = transport.size, transport.rank
    before, behind, final = (rank - 1) % size, (rank + 1) % size, size - 1
    wide = wire.wide
    pieces = list(_ring_pieces(flat_N, transport.piece_bytes, wide))
    if not pieces:
        return
    sums_at = (pieces[0][1] - pieces[0][0]) * wide.itemsize
    for number in range(len(pieces) + 2 * size - 2):
        parts: list[Part] = []
        if 0 <= number - rank < len(pieces):
            begin, end = pieces[number - rank]
            total = flat_N[begin:end].to(wide)
            if rank > 0:
                partial = transport.fetch(before, 0, (end - begin) * wide.itemsize)
                total = partial.view(wide) + total
            if rank == final:
                flat_N[begin:end] = total
                parts.append((sums_at, flat_N[begin:end].view(torch.uint8)))
            else:
                parts.append((0, total.view(torch.uint8)))
        if rank != final and 0 <= number - size - rank < len(pieces):
            begin, end = pieces[number - size - rank]
            length = (end - begin) * flat_N.itemsize
            found = transport.fetch(before, sums_at, length)
            flat_N[begin:end].view(torch.uint8).copy_(found)
            parts.append((sums_at, flat_N[begin:end].view(torch.uint8)))
        transport.post(parts, [behind])


def two_islands(transport: Transport, flat_N: torch.Tensor, wire: Wire) -> None:
    """For two halves of the ranks between which the way is narrow: of each number, a partial sum
    goes from the first half to the second, and the sum back. Four rounds."""
    share = share_rows(transport.size, 2)
    island, place = divmod(transport.rank, share)
    peers = range(island * share, (island + 1) * share)
    opposite = (1 - island) * share + place
    for begin, end in _pieces(len(flat_N), transport.piece_bytes // 2, wire):
        bounds = _shares(end - begin, share, 1)
        first, last = bounds[place : place + 2]
        own = wire.encode(flat_N[begin:end])
        low, high = first * flat_N.itemsize, last * flat_N.itemsize
        transport.post([(0, own)])
        found = [_fetch(transport, peer, own[low:high], low, high - low) for peer in peers]
        if island == 0:
            total = _added(None, found, wire)
            transport.post([(0, total.view(torch.uint8))])
            transport.post([])
            reduced = transport.fetch(opposite, 0, high - low).clone()
            transport.post([(0, reduced)])
        else:
            copied = [part.clone() for part in found]  # the next round ends this one
            transport.post([])
            partial = transport.fetch(opposite, 0, (last - first) * wire.wide.itemsize)
            total = _added(partial.view(wire.wide), copied, wire)
            reduced = wire.encode(total)
            transport.post([(0, reduced)])
        for peer, low, high in zip(peers, bounds, bounds[1:], strict=False):
            found_there = _fetch(transport, peer, reduced, 0, (high - low) * flat_N.itemsize)
            flat_N[begin + low : begin + high] = wire.decode(found_there)
        if island == 1:
            transport.post([])


ALL_REDUCES: Mapping[str, AllReduce] = MappingProxyType(
    {"one-shot": one_shot, "two-shot": two_shot, "ring": ring, "two islands": two_islands}
)


def refusal(name: str, size: int, wire: Wire) -> str | None:
    """Why an all-reduce cannot be done so by `size` ranks; None where it can."""
    if name == "two islands" and (size < 4 or size % 2):
        return f"two islands are of at least two ranks each, not of {size} ranks in all"
    if name in ("ring", "two islands") and wire.unit != 1:
        return f"partial sums of a {name} travel in fp32, not in 8 bits"
    return None


def all_gather(transport: Transport, part_B: torch.Tensor, found_SB: torch.Tensor) -> None:
    """Bytes of everybody: `found_SB` [size, bytes]."""
    for begin, end in _pieces(len(part_B), transport.piece_bytes, Plain(torch.uint8)):
        own = part_B[begin:end]
        transport.post([(0, own)])
        for rank in range(transport.size):
            found_SB[rank, begin:end] = _fetch(transport, rank, own, 0, len(own))


def reduce_scatter(
    transport: Transport, partial_SM: torch.Tensor, total_M: torch.Tensor, wire: Wire
) -> None:
    """Into `total_M` the sum over ranks of the numbers that they have for this one."""
    limit = transport.piece_bytes // transport.size
    for begin, end in _pieces(partial_SM.shape[1], limit, wire):
        length = _bytes(end - begin, wire)
        coded = [wire.encode(part_M[begin:end]) for part_M in partial_SM]
        transport.post([(rank * length, part) for rank, part in enumerate(coded)])
        first = transport.rank * length
        found = [
            _fetch(transport, rank, coded[transport.rank], first, length)
            for rank in range(transport.size)
        ]
        total_M[begin:end] = _added(None, found, wire)


def all_to_all(transport: Transport, parts_SB: torch.Tensor, found_SB: torch.Tensor) -> None:
    """Bytes that everybody has for this rank; both are [size, bytes]."""
    limit = transport.piece_bytes // transport.size
    for begin, end in _pieces(parts_SB.shape[1], limit, Plain(torch.uint8)):
        length = end - begin
        transport.post([(r * length, part[begin:end]) for r, part in enumerate(parts_SB)])
        own = parts_SB[transport.rank, begin:end]
        for rank in range(transport.size):
            found = _fetch(transport, rank, own, transport.rank * length, length)
            found_SB[rank, begin:end] = found


def _sum(
    transport: Transport, own: torch.Tensor, first: int, last: int, wire: Wire
) -> torch.Tensor:
    """Of bytes `first` to `last` of what all ranks posted."""
    found = (
        _fetch(transport, rank, own[first:last], first, last - first)
        for rank in range(transport.size)
    )
    return _added(None, found, wire)


def _fetch(
    transport: Transport, rank: int, own: torch.Tensor, begin: int, length: int
) -> torch.Tensor:
    """What a rank has, which needs no way where it is this one."""
    return own if rank == transport.rank else transport.fetch(rank, begin, length)


def _added(
    total: torch.Tensor | None, parts: Sequence[torch.Tensor] | Iterator[torch.Tensor], wire: Wire
) -> torch.Tensor:
    """A new tensor of the sum of all, in their order."""
    total = None if total is None else total.clone()
    for part in parts:
        values = wire.decode(part)
        if total is None:
            total = values.to(wire.wide, copy=True)
        else:
            total += values
    assert total is not None
    return total


def _pieces(count: int, limit_bytes: int, wire: Wire) -> Iterator[tuple[int, int]]:
    """Parts of `count` numbers of which each takes at most `limit_bytes`."""
    step = max(limit_bytes // wire.unit_bytes, 1) * wire.unit
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def _ring_pieces(
    flat_N: torch.Tensor, limit_bytes: int, wide: torch.dtype
) -> Iterator[tuple[int, int]]:
    """So many that all ranks are busy most of the time, and not so small that rounds cost more."""
    each = wide.itemsize + flat_N.itemsize
    step = max(-(-len(flat_N) // _RING_PIECES), _RING_LEAST_BYTES // each)
    step = min(step, limit_bytes // each)
    for begin in range(0, len(flat_N), step):
        yield begin, min(begin + step, len(flat_N))


def _shares(count: int, size: int, unit: int) -> list[int]:
    """Bounds of the parts of `count` numbers of which each rank sums one, of whole units."""
    units = count // unit
    return [units * rank // size * unit for rank in range(size + 1)]


def _bytes(count: int, wire: Wire) -> int:
    return count // wire.unit * wire.unit_bytes
