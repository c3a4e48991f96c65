"""Group: the ranks that share one model, passed to every layer that needs it, never global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from metainfer.core.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """A set of ranks that compute one model together.

    Layers call `all_reduce` where ranks hold partial sums; with one rank that is the identity.
    `gather` and `broadcast` are for plain objects outside of steps.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise UserError(
                f"a group of {self.size} ranks was asked for, but this version runs one rank",
                hint="leave --tensor-parallel-size at 1",
            )

    def gather(self, value: T) -> list[T] | None:
        """On rank 0 the values of all ranks in their order; None elsewhere."""
        return [value]

    def broadcast(self, value: T) -> T:
        """What rank 0 gave, on every rank."""
        return value

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of `partial` (any shape and dtype), on every rank."""
        return partial
