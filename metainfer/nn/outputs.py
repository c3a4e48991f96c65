"""From what attention heads give to the residual width: inverse rope, then two products."""

from __future__ import annotations

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.nn.linear import Grouped, linear
from metainfer.nn.rows import Rounded, Rows
from metainfer.ops.quantise import QuantiseFp8Case
from metainfer.ops.rope import RotateCase


class AttentionOutputs:
    """out_THD of this rank's heads -> this rank's part of y_TD in the compute dtype."""

    def __init__(self, build: LayerBuilder, prefix: str, heads: int) -> None:
        arch = build.arch
        widths = heads, arch.head_dim
        groups = arch.o_groups // build.group.size
        self._first = Grouped(build, f"{prefix}.wo_a", groups, arch.head_dim)
        self._second = linear(build, f"{prefix}.wo_b")
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
