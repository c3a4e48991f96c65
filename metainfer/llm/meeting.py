"""Where the ranks of an engine meet, and the group that a model keeps however often they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from metainfer.comm.device_queue import CudaQueue
from metainfer.comm.group import Aborted, check_part
from metainfer.comm.library import join_library
from metainfer.comm.router import join_routed, join_routed_gpus
from metainfer.comm.world import World
from metainfer.core.errors import MetainferError
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.llm.rank_orders import Abortable
from metainfer.plan.plan import Plan
from metainfer.plan.ranks import HOST_MEMORY, NCCL, NONE
from metainfer.plan.routes import DECODE, Router

T = TypeVar("T")


class StandingGroup:
    """The group of one rank for as long as its model lives. The ranks meet before the first step,
    and again after one that failed on some of them.

    Attributes:
        calls: collectives since the ranks met; ranks that are in step have made equally many.
    """

    def __init__(self, rank: int, size: int, wire: str) -> None:
        """`wire`: as of `comm.group.Group`, of all that it meets in."""
        self.rank = rank
        self.wire = wire
        self.size = size
        self._calls = 0
        self._parts: list[tuple[tuple[int, ...], StandingGroup]] = []
        self._joined: Abortable | None = None
        self._broken: str | None = None

    @property
    def calls(self) -> int:
        return self._calls + sum(part.calls for _, part in self._parts)

    def meet(self, joined: Abortable) -> None:
        """Use `joined` from now on, and its parts; the one before is left."""
        before, self._joined = self._joined, joined
        self._broken = None
        self._calls = 0
        for ranks, part in self._parts:
            part.meet(joined.part(ranks))
        if before is not None:
            before.close()

    def abort(self, why: str) -> None:
        """End what all ranks wait for, until they meet anew. May be called from any thread."""
        self._break(why)
        if self._joined is not None:
            self._joined.abort(why)

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        for _, part in self._parts:
            part._break(why)

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self._group().all_reduce(partial, phase)

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self._group().all_gather(part_N, phase)

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self._group().reduce_scatter(partial_N, phase)

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self._group().all_to_all(parts_N, phase)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group().send(tensor, to)

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        return self._group().receive(like, sender)

    def gather(self, value: T) -> list[T] | None:
        return self._group().gather(value)

    def broadcast(self, value: T) -> T:
        return self._group().broadcast(value)

    def part(self, ranks: Sequence[int]) -> StandingGroup:
        """Stands as long as this one does, and may be made before the ranks meet."""
        part = StandingGroup(check_part(ranks, self), len(ranks), self.wire)
        self._parts.append((tuple(ranks), part))
        if self._joined is not None:
            part.meet(self._joined.part(ranks))
        return part

    def close(self) -> None:
        if self._joined is not None:
            self._joined.close()

    def _group(self) -> Abortable:
        if self._joined is None:
            raise MetainferError(f"rank {self.rank} has not met the others yet")
        if self._broken is not None:
            raise Aborted(self._broken)
        self._calls += 1
        return self._joined


@dataclass(frozen=True, slots=True)
class HostMeeting:
    """Of ranks that are processes of one host.

    Attributes:
        world: shared by all; made anew for each meeting.
        carried: by what, one of `plan.ranks`.
        ways: which collectives take, as `plan.routes.Router` reads it.
        ranks: of a stage, which the ways are for.
        wire: of sums of prefill.
    """

    world: World
    carried: str
    ways: str
    ranks: int
    wire: str

    @classmethod
    def of(cls, plan: Plan, world: World) -> HostMeeting:
        return cls(
            world,
            plan.collectives.value,
            plan.collective_ways.value,
            plan.tensor_parallel_size.value,
            plan.wire_dtype.value,
        )

    def join(self, rank: int) -> Abortable:
        if self.carried == HOST_MEMORY:
            router = Router([]) if self.ways == NONE else Router.of_words(self.ways)
            return join_routed(self.world, rank, router, self.ranks, self.wire)
        if self.carried == NCCL and self.ways != NONE:
            router = Router.of_words(self.ways)
            return join_routed_gpus(
                self.world, rank, router, self.ranks, self.wire, CudaQueue, JitLauncher
            )
        own_sums = self.carried != NCCL
        return join_library(self.world, rank, self.carried, own_sums=own_sums, wire=self.wire)
