"""Groups over a transport: every operation by the algorithms of `comm.algorithms`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from metainfer.comm import algorithms
from metainfer.comm.algorithms import ALL_REDUCES, Transport
from metainfer.comm.group import share_rows
from metainfer.comm.process_group import ProcessGroup
from metainfer.comm.watch import Watch
from metainfer.comm.wire import wire_of
from metainfer.core.errors import MetainferError
from metainfer.plan.routes import DECODE, PREFILL
from metainfer.plan.ways import way_by_bytes
from metainfer.plan.wires import PLAIN


class Channels(Transport, Protocol):
    """A transport that has, beside rounds, a way from each member to each other.

    Attributes:
        channel_bytes: of the largest piece that goes such a way.
    """

    @property
    def channel_bytes(self) -> int: ...

    def put(self, to: int, piece: torch.Tensor) -> None:
        """Into the channel to a member, when there is room."""

    def take(self, sender: int, piece: torch.Tensor) -> None:
        """Out of the channel from a member, when something is there."""


class TransportGroup(ProcessGroup):
    """What does not depend on how bytes move.

    Attributes:
        wire: as of `comm.group.Group`.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        watch: Watch,
        transport: Channels,
        wire: str,
    ) -> None:
        super().__init__(members, rank, watch)
        self._transport, self.wire = transport, wire

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        wire = self.wire if phase == PREFILL else PLAIN
        return self.all_reduce_by(way_by_bytes("all_reduce", partial.nbytes), partial, wire)

    def all_reduce_by(
        self, algorithm: str, partial: torch.Tensor, wire: str = PLAIN
    ) -> torch.Tensor:
        """By one of `algorithms.ALL_REDUCES`, with one of `plan.wires.WIRES`. Raises MetainferError
        where those do not go together."""
        form = wire_of(wire, partial)
        why = algorithms.refusal(algorithm, self.size, form)
        if why:
            raise MetainferError(why)
        partial = partial.contiguous()
        with self._during("all_reduce", partial.nbytes):
            ALL_REDUCES[algorithm](self._transport, partial.view(-1), form)
        return partial

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        part_N = part_N.contiguous()
        found = part_N.new_empty(self.size * len(part_N), *part_N.shape[1:])
        with self._during("all_gather", part_N.nbytes):
            algorithms.all_gather(self._transport, _bytes(part_N), _by_rank(found, self.size))
        return found

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self.reduce_scatter_by(partial_N, self.wire if phase == PREFILL else PLAIN)

    def reduce_scatter_by(self, partial_N: torch.Tensor, wire: str) -> torch.Tensor:
        """With one of `plan.wires.WIRES`."""
        rows = share_rows(len(partial_N), self.size)
        form = wire_of(wire, partial_N)
        total = partial_N.new_empty(rows, *partial_N.shape[1:])
        with self._during("reduce_scatter", partial_N.nbytes):
            algorithms.reduce_scatter(
                self._transport,
                partial_N.contiguous().view(self.size, total.numel()),
                total.view(-1),
                form,
            )
        return total

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        share_rows(len(parts_N), self.size)
        parts_N = parts_N.contiguous()
        found = torch.empty_like(parts_N)
        with self._during("all_to_all", parts_N.nbytes):
            parts_SB, found_SB = _by_rank(parts_N, self.size), _by_rank(found, self.size)
            algorithms.all_to_all(self._transport, parts_SB, found_SB)
        return found

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with self._during("send", tensor.nbytes):
            for piece in _bytes(tensor.contiguous()).split(self._transport.channel_bytes):
                self._transport.put(to, piece)

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        found = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        with self._during("receive", found.nbytes):
            for piece in _bytes(found).split(self._transport.channel_bytes):
                self._transport.take(sender, piece)
        return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _by_rank(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 [size, bytes] of what is divided over ranks."""
    whole = _bytes(tensor)
    return whole.view(size, len(whole) // size)
