"""Weights that come into the L2 cache before their products read them.

A decode step of few rows reads its weights in large products; between these, small kernels run and
the memory idles. What the next products read is asked for then, on a stream of its own: the kernels
that do so wait for what runs on the current stream, and nobody waits for them but the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from metainfer.nn.builder import LayerBuilder, Prefetch
from metainfer.nn.step_index import StepIndex
from metainfer.ops.prefetch import PrefetchCase

MOST_ROWS = 16
"""Rows of steps whose products read weights no slower than memory gives them: steps of more rows
keep the memory busy themselves."""
_ALIGNMENT = 16


class WeightsAhead:
    """Asks for the weights of products to come, the first of them first."""

    def __init__(self, build: LayerBuilder, weights: Sequence[torch.Tensor]) -> None:
        """`weights`: in the order in which they are read; what is beyond the limit is left out."""
        self._stream = None if build.prefetch is None else build.prefetch.stream
        self._asks: list[Callable[[], Any]] = []
        left = 0 if build.prefetch is None else build.prefetch.most_bytes
        for weight in weights:
            if left <= 0 or not _is_askable(weight):
                continue
            weight_N = weight.view(torch.uint8).flatten()
            case = PrefetchCase(len(weight_N), min(left, len(weight_N)), build.dtype)
            self._asks.append(partial(build.kernel("weights.prefetch", case), weight_N))
            left -= len(weight_N)

    def __call__(self, step: StepIndex) -> None:
        """Ask, where `step` decodes few rows and nothing else."""
        if not self._asks or step.decode is None or step.prefills:
            return
        if step.decode.num_rows > MOST_ROWS:
            return
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for ask in self._asks:
                ask()


def join(prefetch: Prefetch | None) -> None:
    """The end of a step: a graph of it has no loose ends."""
    if prefetch is not None:
        torch.cuda.current_stream().wait_stream(prefetch.stream)


def _is_askable(weight: torch.Tensor) -> bool:
    """Whether it lies as `weights.prefetch` takes it."""
    begins = weight.is_meta or weight.data_ptr() % _ALIGNMENT == 0
    return begins and weight.is_contiguous() and weight.numel() > 0
