"""Stages of a pipeline: which layers each has, and what lies before and behind them.

Ranks 0 and those that follow are of the last stage: rank 0 tells all others what to compute, and
what is drawn is known to it first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

_LAYER = re.compile(r"layers\.(\d+)\..*")
_EMBEDDING = "embed.weight"


@dataclass(frozen=True, slots=True)
class Stage:
    """Attributes:
    number: of `count`, the first is 0.
    layers: that it has. The first stage has the embedding as well, the last one the head.
    """

    number: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def has(self, name: str) -> bool:
        """Whether the tensor `name` of a model, not of its drafting blocks, is of this stage."""
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            return int(layer[1]) in self.layers
        return self.is_first if name == _EMBEDDING else self.is_last


@cache
def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Layers of each stage of a pipeline, as even as they go. Layers cost nearly the same; the last
    stage, which has the head as well, never has more of them than others."""
    bounds = [-(-layers * stage // stages) for stage in range(stages + 1)]
    return tuple(range(low, high) for low, high in pairwise(bounds))


def stage_of(number: int, count: int, layers: int) -> Stage:
    """One of `count` stages of a model of so many layers."""
    return Stage(number, count, stage_layers(layers, count)[number])


def place_of(rank: int, ranks: int, stages: int) -> tuple[int, int]:
    """(number of its stage, which of the stage's ranks) one of all `ranks` is."""
    size = ranks // stages
    return stages - 1 - rank // size, rank % size
