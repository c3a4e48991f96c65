"""The generic path: never chosen unless named, and a model on it gives what the others give."""

from __future__ import annotations

from pathlib import Path

import pytest

from metainfer.arch.tiny import tiny_quantised_config
from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import SamplingParams
from metainfer.ops.base import Target
from metainfer.ops.kernel_order import COMPOSED
from metainfer.plan.settings import EngineSettings
from metainfer.weights.synth import write_checkpoint

ORDER = "*=composed,native,cpu,reference"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("composed") / "tiny", tiny_quantised_config())


def scored(directory: Path, order: str | None, dtype: str) -> Result:
    settings = EngineSettings(
        kernel_order=order, device="cpu", dtype=dtype, num_blocks_override=8, max_num_seqs=2,
        max_num_batched_tokens=96, threads=1,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    with Engine.load(directory, settings) as engine:
        used = {kernel.backend for kernel in engine.kernels if not kernel.op.startswith("sample.")}
        assert (used == {COMPOSED}) is (order is not None)
        expanded = engine.plan.weights_residency.value == "expanded"
        assert expanded is (order is not None)
        (result,) = generate(engine, [list(range(20, 320))], sampling)
    return result


def test_a_model_on_the_generic_path_predicts_the_same(checkpoint: Path) -> None:
    generic, ours = scored(checkpoint, ORDER, "float32"), scored(checkpoint, None, "float32")
    assert generic.token_ids == ours.token_ids
    for one, other in zip(generic.prompt_logprobs[1:], ours.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=2e-3)


def test_it_is_in_no_default_order() -> None:
    registry = builtin_registry()
    for target in (Target("cpu"), Target("cuda", (9, 0))):
        able = registry.capabilities(target)
        assert COMPOSED not in able.default_order
        assert COMPOSED in able.expanding


def test_expanding_weights_names_kernels_and_not_the_generic_path(checkpoint: Path) -> None:
    settings = EngineSettings(
        weights_residency="expanded", device="cpu", num_blocks_override=2, threads=1
    )
    with Engine.load(checkpoint, settings) as engine:
        assert COMPOSED not in {kernel.backend for kernel in engine.kernels}
    contradicting = EngineSettings(
        weights_residency="quantised", kernel_order=ORDER, device="cpu", num_blocks_override=2
    )
    with pytest.raises(UserError, match="contradicts --kernel-order: composed expands weights"):
        Engine.load(checkpoint, contradicting)
