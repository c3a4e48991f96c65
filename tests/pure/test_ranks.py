"""What the plan and the host give to each of several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.arch.families import read_arch
from metainfer.arch.stages import stage_of
from metainfer.core.errors import UserError
from metainfer.hardware.binding import cores_of, deal_cores
from metainfer.hardware.machine import Gpu, NumaNode
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import cache_formats
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.plan.build import CPU, build_plan
from metainfer.plan.graphs import graphs_switch
from metainfer.plan.ledger import block_bytes, state_bytes, weights_bytes
from metainfer.plan.plan import Plan
from metainfer.plan.settings import EngineSettings
from tests.fakes.machines import GIB, make_machine

FLASH = read_arch("deepseek-v4-flash")
CARD = Gpu("NVIDIA RTX PRO 6000", (12, 0), 96 * GIB, 95 * GIB)


def plan(target: Target = CPU, gpus: tuple[Gpu, ...] = (), **flags) -> Plan:
    able = Capabilities(target, dict.fromkeys(OPS, ("any",)), ("any",), frozenset())
    machine = replace(make_machine(available=400 * GIB), gpus=gpus)
    return build_plan(machine, FLASH, EngineSettings(**flags), able)


def test_weights_and_the_host_s_memory_are_divided():
    one, two = plan(max_model_len=4096), plan(max_model_len=4096, tensor_parallel_size=2)
    assert 0.5 < two.weights_bytes.value / one.weights_bytes.value < 0.55
    assert two.blocks_bytes.value == one.blocks_bytes.value  # every rank keeps all entries
    assert two.threads.value == one.threads.value // 2
    assert (one.collectives.value, two.collectives.value) == ("none", "host memory")
    with pytest.raises(UserError, match=r"for each of 2 ranks, 20% of the"):
        plan(memory_utilization=0.2, tensor_parallel_size=2)


def test_each_rank_has_a_gpu():
    eight = plan(Target("cuda", (12, 0)), (CARD,) * 8, tensor_parallel_size=4)
    assert [eight.of_rank(rank).device.value for rank in range(4)] == [
        "cuda:0", "cuda:1", "cuda:2", "cuda:3",
    ]  # fmt: skip
    assert eight.collectives.value == "nccl" and eight.cuda_graphs.value == "on"
    assert eight.weights_bytes.value < 48 * GIB
    later = plan(Target("cuda", (12, 0)), (CARD,) * 8, tensor_parallel_size=2, device="cuda:6")
    assert later.of_rank(1).device.value == "cuda:7"


@pytest.mark.parametrize(
    ("gpus", "flags", "sentence"),
    [
        ((CARD,), {}, "asks for 2 GPUs, and there are 1"),
        ((CARD,) * 4, {"device": "cuda:3"}, "asks for 2 GPUs, and there are 1 from cuda:3 on"),
        ((CARD, replace(CARD, name="L40S", capability=(8, 9))), {}, "L40S would share a model"),
    ],
)
def test_gpus_that_cannot_share_a_model_are_refused(gpus, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(Target("cuda", (12, 0)), gpus, tensor_parallel_size=2, **flags)


def test_the_fullest_gpu_decides():
    used = replace(CARD, free_bytes=60 * GIB)
    target = Target("cuda", (12, 0))
    free = plan(target, (CARD,) * 4, tensor_parallel_size=4)
    with_less = plan(target, (CARD, CARD, used, CARD), tensor_parallel_size=4)
    assert with_less.num_blocks.value < free.num_blocks.value


def test_a_stage_holds_its_layers_alone():
    """The ledger is that of the stage that needs most: here the first one, with a layer more."""
    one = plan(max_model_len=4096)
    two = plan(max_model_len=4096, pipeline_parallel_size=2)
    stages = [stage_of(number, 2, FLASH.num_layers) for number in range(2)]
    formats = "quantised", one.compute_dtype.value
    weights = [weights_bytes(FLASH, *formats, stage=stage) for stage in stages]
    assert sum(weights) == one.weights_bytes.value
    assert two.weights_bytes.value == max(weights) == weights[0]
    caches = cache_formats(FLASH, one.cache_dtype.value, one.index_cache_dtype.value)
    rings = [state_bytes(FLASH, 1, caches, 0, stage.layers) for stage in stages]
    assert sum(rings) * one.max_num_seqs.value == one.state_bytes.value
    assert two.state_bytes.value == rings[0] * two.max_num_seqs.value
    blocks = [block_bytes(FLASH, caches, stage.layers) for stage in stages]
    assert sum(blocks) == block_bytes(FLASH, caches)
    assert "layers 0 to 21, quantised, on stage 1 of 2" in two.weights_bytes.reason
    assert (two.ranks, two.threads.value) == (2, one.threads.value // 2)
    assert (one.steps_ahead, two.steps_ahead) == (0, 1)


def test_the_last_stage_has_rank_0():
    cards = plan(
        Target("cuda", (12, 0)), (CARD,) * 8, tensor_parallel_size=4, pipeline_parallel_size=2
    )
    assert cards.ranks == 8 and cards.steps_ahead == 2
    places = [cards.place_of(rank, 43) for rank in range(8)]
    assert [(stage.number, place) for stage, place in places] == [
        (1, 0), (1, 1), (1, 2), (1, 3), (0, 0), (0, 1), (0, 2), (0, 3),
    ]  # fmt: skip
    assert cards.of_rank(7).device.value == "cuda:7"
    with pytest.raises(UserError, match="a model on 16 ranks asks for 16 GPUs, and there are 8"):
        plan(Target("cuda", (12, 0)), (CARD,) * 8, tensor_parallel_size=4, pipeline_parallel_size=4)


def test_experts_are_dealt_whole_or_in_slices():
    sliced = plan(max_model_len=4096, tensor_parallel_size=4)
    for flags, parts in (({"enable_expert_parallel": True}, 4), ({"expert_parallel_size": 2}, 2)):
        dealt = plan(max_model_len=4096, tensor_parallel_size=4, **flags)
        assert dealt.expert_parallel_size.value == parts
        assert dealt.weights_bytes.value == sliced.weights_bytes.value  # as much, but other parts


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"expert_parallel_size": 2}, "experts cannot be dealt over 2 parts of 1 ranks"),
        (
            {"tensor_parallel_size": 4, "expert_parallel_size": 3},
            "experts cannot be dealt over 3 parts of 4 ranks",
        ),
        (
            {"tensor_parallel_size": 4, "expert_parallel_size": 2, "enable_expert_parallel": True},
            "deals experts over all 4 ranks of a stage, and --expert-parallel-size 2 over 2 parts",
        ),
        ({"pipeline_parallel_size": 44}, "asks for more stages than the 43 layers"),
    ],
)
def test_what_cannot_be_divided_is_refused(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(**flags)


def test_ranks_that_wait_on_the_host_have_no_graphs():
    switch = graphs_switch("cuda", EngineSettings(), "host memory")
    assert switch.value == "off" and "no graph can hold it" in switch.reason
    with pytest.raises(UserError, match="talk over gloo wait for each other on the host"):
        graphs_switch("cuda", EngineSettings(cuda_graph_sizes=(8,)), "gloo")


# ---- processors ----


def topology(root: Path, cores: int) -> None:
    """Two threads of a core, numbered as most systems do: n and n + cores."""
    for cpu in range(2 * cores):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        first = cpu % cores
        (folder / "thread_siblings_list").write_text(f"{first},{first + cores}\n")


def test_ranks_get_whole_cores_of_one_node(tmp_path: Path):
    topology(tmp_path, 8)
    even = NumaNode(0, tuple(range(0, 16, 2)), 0)
    odd = NumaNode(1, tuple(range(1, 16, 2)), 0)
    cores = cores_of(range(16), (even, odd), tmp_path)
    dealt = deal_cores(cores, 2)
    assert dealt == [even.cpus, odd.cpus]
    four = deal_cores(cores, 4)
    assert four[0] == (0, 2, 8, 10) and sorted(cpu for own in four for cpu in own) == [*range(16)]


def test_with_fewer_cores_than_ranks_nobody_is_bound(tmp_path: Path):
    assert deal_cores(cores_of([3, 5], (), tmp_path), 4) == [()] * 4
    assert deal_cores(cores_of([3, 5, 6], (), tmp_path), 2) == [(3,), (5,)]
