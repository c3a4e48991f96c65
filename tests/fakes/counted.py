"""A group on paper that counts what its rank would send, by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from metainfer.comm.group import check_part
from metainfer.comm.on_paper import OnPaper
from metainfer.plan.routes import DECODE


class Counted(OnPaper):
    """Bytes as of rings and two-shot sums, which send the least."""

    sent: Counter[str]

    def __init__(self, rank: int, size: int, sent: Counter[str] | None = None) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "sent", Counter() if sent is None else sent)

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        self.sent["all_reduce"] += 2 * (self.size - 1) * partial.nbytes // self.size
        return super().all_reduce(partial, phase)

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        self.sent["all_gather"] += (self.size - 1) * part_N.nbytes
        return super().all_gather(part_N, phase)

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        self.sent["reduce_scatter"] += (self.size - 1) * partial_N.nbytes // self.size
        return super().reduce_scatter(partial_N, phase)

    def part(self, ranks: Sequence[int]) -> Counted:
        return Counted(check_part(ranks, self), len(ranks), self.sent)
