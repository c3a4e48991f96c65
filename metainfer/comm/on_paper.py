"""A group whose other ranks are not there: tensors have shapes and no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from metainfer.comm.group import check_part, share_rows
from metainfer.core.errors import MetainferError
from metainfer.plan.routes import DECODE
from metainfer.plan.wires import PLAIN

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnPaper:
    """One rank of `size`; what others would give has the shape of what this one has."""

    rank: int
    size: int
    wire: str = PLAIN

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return partial

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return part_N.repeat(self.size, *[1] * (part_N.dim() - 1))

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return partial_N[: share_rows(len(partial_N), self.size)]

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return parts_N

    def send(self, tensor: torch.Tensor, to: int) -> None:
        return None

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        return torch.empty_like(like)

    def gather(self, value: T) -> list[T] | None:
        raise MetainferError("ranks on paper have no values to gather")

    def broadcast(self, value: T) -> T:
        return value

    def part(self, ranks: Sequence[int]) -> OnPaper:
        return OnPaper(check_part(ranks, self), len(ranks), self.wire)

    def close(self) -> None:
        return None
