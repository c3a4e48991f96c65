"""The plan of half of V4-Flash on one GPU of 139 GiB: a million tokens fit beside batches, in both
formats of caches, and all of the model does not."""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.arch.families import read_arch
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Gpu
from metainfer.ops.base import Target
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.plan.build import build_plan
from metainfer.plan.plan import Plan
from metainfer.plan.settings import EngineSettings
from tests.fakes.machines import GIB, make_machine

HOPPER = Target("cuda", (9, 0))
MACHINE = make_machine(gpus=(Gpu("NVIDIA H200", (9, 0), 139 * GIB, 138 * GIB),))
ABLE = Capabilities(HOPPER, dict.fromkeys(OPS, ("triton",)), ("triton",), frozenset())
LONG = 1_040_064


def plan(layers: int, sequences: int, **flags: Any) -> Plan:
    settings = EngineSettings(
        max_model_len=LONG, max_num_seqs=sequences, max_num_batched_tokens=8192, **flags
    )
    arch = read_arch("deepseek-v4-flash", {"num_hidden_layers": layers})
    return build_plan(MACHINE, arch, settings, ABLE)


@pytest.mark.parametrize(
    ("flags", "cache_gb"),
    [
        ({"kv_cache_dtype": "bfloat16"}, 3.40),
        ({"kv_cache_dtype": "fp8", "index_cache_dtype": "fp8"}, 1.93),
    ],
)
@pytest.mark.parametrize("sequences", [1, 32])
def test_a_million_tokens_fit(sequences: int, flags: dict[str, str], cache_gb: float) -> None:
    made = plan(21, sequences, **flags)
    assert made.weights_bytes.value / 1e9 == pytest.approx(77.6, abs=0.1)
    blocks = made.num_blocks.value
    per_block = made.blocks_bytes.value / blocks
    assert per_block * 8126 / 1e9 == pytest.approx(cache_gb, rel=0.05)
    assert blocks >= 8126
    ledger = (
        made.weights_bytes, made.state_bytes, made.blocks_bytes, made.activation_bytes,
        made.graphs_bytes,
    )  # fmt: skip
    assert sum(line.value for line in ledger) <= 0.9 * 138 * GIB
    assert made.activation_bytes.value < 14e9
    assert (made.max_model_len.value, made.max_num_seqs.value) == (LONG, sequences)
    assert made.cuda_graph_contexts.value[-1] == LONG


def test_all_layers_do_not_fit() -> None:
    with pytest.raises(UserError, match="does not fit") as refused:
        plan(43, 1)
    assert refused.value.hint is not None
