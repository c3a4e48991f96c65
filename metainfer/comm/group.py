"""Group: the ranks that share one model, passed to every layer that needs it, never global.

What the members of a group promise each other: all of them call the same operations in the same
order, with tensors of equal shape and dtype. A sum is the same on every rank, bit for bit, and does
not depend on which transport or algorithm moved the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from metainfer.core.errors import MetainferError
from metainfer.plan.routes import DECODE
from metainfer.plan.wires import PLAIN

T = TypeVar("T")

DEADLINE_S = 60.0
"""How long a rank waits for others where nobody said otherwise."""


class GroupError(MetainferError):
    """The ranks of a group cannot go on together; the message says who and in which operation."""


class Stalled(GroupError):
    """Somebody did not come in time; the message says who."""


class RankLost(GroupError):
    """A rank ended, or left, while others needed it."""


class Aborted(GroupError):
    """Another rank gave up, which ends what this one waits for."""


class Group(Protocol):
    """A set of ranks that compute one model together; one object for each rank.

    Collectives have a phase, one of `plan.routes.PHASES`: what is called so for decoding may stand
    in a graph. `gather`, `broadcast` and `part` are for outside of steps.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def wire(self) -> str:
        """In which form numbers that are summed for prefill travel, one of `plan.wires.WIRES`."""

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        """Sum over ranks of `partial` (any shape), on every rank.

        Summed in fp32 in the order of ranks and rounded once to the dtype of `partial`, which may
        be overwritten. In prefill what ranks have, and the sum, are rounded to the wire before.
        """

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        """[size * N, ...]: the parts of all ranks, of equal shape and any dtype, in their order."""

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        """[N / size, ...]: this rank's rows of the sum, which is rounded to no wire."""

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        """[N, ...]: of N / size rows each, what every rank had at the place of this one."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when `tensor` may be overwritten, which can be when `to` has received it."""

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        """A new tensor, of the shape and dtype of `like`, of what `sender` sent here next."""

    def gather(self, value: T) -> list[T] | None:
        """On rank 0 the values of all ranks in their order; None elsewhere."""

    def broadcast(self, value: T) -> T:
        """What rank 0 gave, on every rank."""

    def part(self, ranks: Sequence[int]) -> Group:
        """The group of some of the ranks, this one among them, in the order given.

        Every rank of this group calls it, each with the part that it is in.
        """

    def close(self) -> None:
        """Leave. Whoever still waits for this rank is told so."""


@dataclass(frozen=True, slots=True)
class Solo:
    """The group of one rank, in which every operation is the identity."""

    rank: int = 0
    size: int = 1
    wire: str = PLAIN

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise MetainferError(f"rank {self.rank} of {self.size} is not alone")

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return partial

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return part_N

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return partial_N

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return parts_N

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise MetainferError(f"a rank that is alone cannot send to rank {to}")

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        raise MetainferError(f"a rank that is alone cannot receive from rank {sender}")

    def gather(self, value: T) -> list[T] | None:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def part(self, ranks: Sequence[int]) -> Solo:
        check_part(ranks, self)
        return self

    def close(self) -> None:
        return None


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What every sum over ranks is: in fp32 (whole numbers in int64), in the order given, rounded
    once to the dtype of the parts."""
    wide = torch.float32 if parts[0].is_floating_point() else torch.int64
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def share_rows(rows: int, size: int) -> int:
    """Rows of each rank, where `rows` are divided over `size` ranks. Raises where they do not."""
    if rows % size:
        raise MetainferError(f"{rows} rows cannot be divided evenly over {size} ranks")
    return rows // size


def check_part(ranks: Sequence[int], group: Group) -> int:
    """The rank that a rank of `group` has in the part of `ranks`. Raises where it has none."""
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < group.size for rank in ranks):
        raise MetainferError(f"ranks {list(ranks)} are no part of {group.size} ranks")
    if group.rank not in ranks:
        raise MetainferError(f"rank {group.rank} is not in the part of ranks {list(ranks)}")
    return list(ranks).index(group.rank)
