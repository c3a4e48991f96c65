"""The RMS norm as a layer."""

from __future__ import annotations

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.ops.norm import RmsNormCase


class RmsNorm:
    """x_TD -> x / rms(x) * weight in the compute dtype."""

    def __init__(self, build: LayerBuilder, prefix: str) -> None:
        self._weight_D = build.norm_weight(prefix)
        case = RmsNormCase(len(self._weight_D), build.arch.rms_norm_eps, build.dtype)
        self._run = build.kernel("norm.rms_norm", case)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._run(x_TD, self._weight_D)
