"""The list of what a rank runs is what its layers bind."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.record import Arch
from metainfer.arch.tiny import tiny_arch, tiny_quantised_arch
from metainfer.core.errors import UserError
from metainfer.ops.uses_v4 import served_uses
from tests.fakes.shapes_only import build_shapes

MODELS = {
    "deepseek-v4-flash": (read_arch("deepseek-v4-flash"), (1, 2, 4, 8)),
    "pebble": (read_arch("pebble"), (1,)),
    "tiny": (tiny_arch(), (1, 2)),
    "tiny, fp8 and fp4": (tiny_quantised_arch(), (1,)),
    "fp8 experts, fp32 scales": (tiny_quantised_arch(expert_dtype="fp8"), (1,)),
    "blocks that straddle": (tiny_quantised_arch(q_lora_rank=192), (1,)),
}
LAYOUTS = [
    pytest.param(arch, ranks, id=f"{name}, {ranks}")
    for name, (arch, layouts) in MODELS.items()
    for ranks in layouts
]


@pytest.mark.parametrize(("arch", "ranks"), LAYOUTS)
def test_uses_are_what_the_model_binds(arch: Arch, ranks: int) -> None:
    model = build_shapes(arch, ranks)
    bound = Counter((kernel.op, kernel.case) for kernel in model.kernels)
    listed = {(use.op, use.case): use.times for use in served_uses(arch, ranks)}
    assert listed == dict(bound)


def test_uses_in_fp32_are_what_the_model_binds() -> None:
    arch = tiny_arch()
    bound = {(kernel.op, kernel.case) for kernel in build_shapes(arch, 1, torch.float32).kernels}
    uses = served_uses(arch, 1, "float32", "float32")
    assert {(use.op, use.case) for use in uses} == bound


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be divided over 3 ranks: attention heads: 64"):
        served_uses(read_arch("deepseek-v4-flash"), 3)
