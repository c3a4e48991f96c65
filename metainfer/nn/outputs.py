"""From what attention heads give to the residual width: inverse rope, then two products."""

from __future__ import annotations

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.nn.linear import Grouped, Linear
from metainfer.nn.rows import Rounded, Rows
from metainfer.ops.quantise import QuantiseFp8Case
from metainfer.ops.rope import RotateCase
from metainfer.weights.formats import Weight


class AttentionOutputs:
    """out_THD of this rank's heads -> this rank's part of y_TD in the compute dtype."""

    def __init__(self, build: LayerBuilder, first: Weight, second: Weight, heads: int) -> None:
        """`first`: of the output groups of `heads` heads; `second`: the columns that read them."""
        arch = build.arch
        widths = heads, arch.head_dim
        groups = first.shape[0] // arch.o_lora_rank
        self._first = Grouped(build, first, groups, arch.head_dim)
        self._second = Linear(build, second)
        self._between = Rounded(build, groups * arch.o_lora_rank, coded=self._second.coded)
        if self._first.coded:
            assert build.rounding is not None
            case = QuantiseFp8Case(*widths, *build.rounding, arch.rope_head_dim, build.dtype)
            self._unrotate = build.kernel("quantise.fp8", case)
        else:
            rotate = RotateCase(*widths, arch.rope_head_dim, inverse=True, dtype=build.dtype)
            self._unrotate = build.kernel("rope.rotate", rotate)

    def __call__(self, out_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
        if self._first.coded:
            rows = Rows(None, *self._unrotate(out_THD, rotation_TR2))
        else:
            rows = Rows(self._unrotate(out_THD, rotation_TR2).flatten(1))
        return self._second(self._between(self._first(rows)))
