"""Weights are not brought near here: a reference is as right without."""

from __future__ import annotations

import torch

from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.prefetch import PrefetchCase


def prefetch(case: PrefetchCase, weight_N: torch.Tensor) -> tuple[()]:
    """Does nothing."""
    return ()


BACKENDS = (Backend("weights.prefetch", REFERENCE, prefetch),)
