"""The shipped model on this GPU: the same tokens as on the CPU, and no slow path without a word."""

from __future__ import annotations

import pytest
import torch

from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import SamplingParams
from metainfer.ops.kernel_order import REFERENCE
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# Shorter than a window, longer than one, longer than what the indexer lets through unscored.
LENGTHS = (5, 200, 900)


def tokens(settings: EngineSettings) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 4000, (n,), generator=generator).tolist() for n in LENGTHS]
    with Engine.load(pebble_dir(), settings) as engine:
        assert all(result.error is None for result in generate(engine, prompts, GREEDY))
        return [result.token_ids for result in generate(engine, prompts, GREEDY)]


def test_greedy_tokens_are_those_of_the_cpu() -> None:
    common = {"activations": "plain", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
    common["max_num_batched_tokens"] = 256
    on_gpu = EngineSettings(device="cuda", **common)
    assert tokens(on_gpu) == tokens(EngineSettings(device="cpu", **common))


def test_bfloat16_runs_to_the_end() -> None:
    settings = EngineSettings(device="cuda", max_model_len=1024)
    assert all(len(answer) == GREEDY.max_tokens for answer in tokens(settings))


def test_no_operation_runs_on_a_reference_unless_named() -> None:
    with Engine.load(pebble_dir(), EngineSettings(device="cuda", max_model_len=1024)) as engine:
        assert {kernel.backend for kernel in engine.kernels} <= {"cuda", "triton", "torch"}
        assert engine.plan.cuda_graphs.value == "on"
    named = EngineSettings(device="cuda", kernel_order=f"*={REFERENCE}", max_model_len=1024)
    with Engine.load(pebble_dir(), named) as engine:
        assert engine.plan.cuda_graphs.value == "off"
        (result,) = generate(engine, [[5, 6, 7]], GREEDY)
        assert result.error is None
