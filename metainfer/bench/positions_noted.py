"""What is noted of a layer at sampled positions, and which tokens its entries mix."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from metainfer.arch.record import LayerArch, LayerKind


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison. `error`: largest difference over the largest number expected."""

    op: str
    layer: int
    position: int
    error: float
    tolerance: float
    problem: str


@dataclass(slots=True)
class NotedLayer:
    """What was noted of one layer.

    Attributes:
        latents: by position, [K].
        states: by compressor (0: of entries, 1: of index keys) and position, [row width].
        entries: by compressor and window, what the references make of the states.
        chosen: by position, of the indexer in this step.
    """

    arch: LayerArch
    latents: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    entries: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    compressed: int = 0  # compressors that ran in this step


def span_of(layer: LayerArch) -> int:
    """Tokens that an entry mixes: two windows where an indexer chooses among entries."""
    return layer.ratio * (2 if layer.kind is LayerKind.COMPRESSED_SPARSE else 1)


def tokens_of(window: int, ratio: int, span: int) -> range:
    """Positions that the entry of a window mixes."""
    stop = (window + 1) * ratio
    return range(max(0, stop - span), stop)


def within(numbers: set[int], first: int, stop: int) -> list[int]:
    """Those from `first` to `stop` - 1, ascending."""
    if stop - first < len(numbers):
        return [n for n in range(first, stop) if n in numbers]
    return sorted(n for n in numbers if first <= n < stop)
