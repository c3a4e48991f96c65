"""How many launches a decode step takes, counted without a GPU: layer by layer, so that none comes
back unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from metainfer.arch.families import read_arch
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.nn.cache import CacheStorage
from metainfer.nn.inputs import DecodeInputs
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import CacheFormats
from tests.fakes.shapes_only import build_shapes

H200 = (9, 0)
PLAIN = CacheFormats(latents="bfloat16", index_keys="bfloat16")
SLOTS, BLOCKS = 8, 20  # more entries than an indexer chooses
MOST = {0: 24, 4: 33, 128: 26}
"""Launches and operations of torch of one layer, by ratio."""
MOST_AROUND = 4
"""The index of the step, what makes streams of tokens, and the last expansion, joined to no mix."""


class TorchWork(TorchDispatchMode):
    """Counts operations of torch that move data: no views, no memory that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        aliases = [result.alias_info for result in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        name = function.overloadpacket.__name__
        if not is_view and "empty" not in name and name != "detach":
            self.names.append(name)
        return function(*arguments, **(named or {}))


def step_of(ratios: list[int]) -> list[str]:
    """All that one decode step of one row starts, in layers of these ratios."""
    overrides = {"num_hidden_layers": len(ratios), "compress_ratios": ratios, "num_hash_layers": 0}
    arch = read_arch("deepseek-v4-flash", overrides)
    launch = RecordingLauncher(H200, 132)
    model = build_shapes(
        arch,
        1,
        activations="fp8",
        caches=PLAIN,
        registry=builtin_registry(launch),
        target=Target("cuda", H200),
    )
    cache = CacheStorage(
        arch,
        num_slots=SLOTS,
        num_blocks=BLOCKS,
        formats=PLAIN,
        draft_rows=0,
        device="meta",
        spare=True,
    )
    one = torch.zeros(1, dtype=torch.int64, device="meta")
    tables_NM = torch.zeros(SLOTS + 1, BLOCKS, dtype=torch.int64, device="meta")
    with TorchWork() as torch_work:
        model.forward(DecodeInputs(one, one, one, tables_NM, may_pad=False), cache)
    return [*(started.unit.name for started in launch.launches), *torch_work.names]


@pytest.fixture(scope="module")
def around() -> Iterator[int]:
    """What a step starts beside its layers: twice a layer's less than two layers'."""
    yield 2 * len(step_of([0])) - len(step_of([0, 0]))


@pytest.mark.parametrize("ratio", sorted(MOST))
def test_a_layer_of_each_kind(ratio: int) -> None:
    one, two = step_of([ratio]), step_of([ratio, ratio])
    assert len(two) - len(one) <= MOST[ratio], two[len(one) :]


def test_what_is_done_once_a_step(around: int) -> None:
    assert around <= MOST_AROUND
