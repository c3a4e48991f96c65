"""DeepseekV4 in every format: bf16 and quantised checkpoints, bf16 compute, expanded weights."""

from __future__ import annotations

import pytest
import torch

from metainfer.arch.manifest import iterate
from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.nn.builder import dtype_name
from metainfer.ops.cache_formats import CacheFormats
from tests.fakes.random_models import HARD, RandomModel, dequantised, random_model
from tests.fakes.steps import EXPANDED_ORDER, REFERENCE_ORDER, Driver, load_model

LENGTH = 200
# fp8 linear layers whose parts do not fill blocks of 128 rows: nothing can be stacked.
UNEVEN = {"q_lora_rank": 96, "moe_intermediate_size": 160, "hidden_size": 160}

CONFIGS = {
    "bf16": tiny_config(torch_dtype="bfloat16", **HARD),
    "fp8_fp4": tiny_quantised_config(**HARD),
    "fp8_fp8": tiny_quantised_config(expert_dtype="fp8", **HARD),
    "fp8_with_fp32_scales": tiny_quantised_config(
        expert_dtype="fp8",
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        **HARD,
    ),
    "bf16_fp4": tiny_config(torch_dtype="bfloat16", expert_dtype="fp4", **HARD),
    "uneven": tiny_quantised_config(**UNEVEN, **HARD),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return random_model(directory, CONFIGS[request.param], seed=3)


@pytest.fixture(scope="module")
def plain(stored: RandomModel, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Logits of the same numbers written as an fp32 checkpoint and computed by the reference."""
    directory = tmp_path_factory.mktemp("plain") / "model"
    return logits(dequantised(stored, directory))


def logits(model: RandomModel, **options) -> torch.Tensor:
    driver = Driver(
        load_model(model.directory, model.arch, **options),
        model.arch,
        caches=CacheFormats(*[dtype_name(options.get("compute_dtype", torch.float32))] * 2),
    )
    sequence = driver.start()
    tokens = model.tokens(LENGTH)
    parts = [driver.step((sequence, tokens[:70]))[0], driver.step((sequence, tokens[70:-9]))[0]]
    return torch.cat([*parts, driver.decode(tokens[-9:], sequence)])


def divergence(expected: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over rows of KL(expected || other), nats."""
    p, q = expected.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    "order", [REFERENCE_ORDER, "", EXPANDED_ORDER], ids=["reference", "default", "expanded"]
)
def test_stored_formats_compute_what_their_numbers_say(
    stored: RandomModel, plain: torch.Tensor, order: str
) -> None:
    ours = logits(stored, kernel_order=order)
    assert (ours - plain).abs().max() < 1e-5


@pytest.mark.parametrize("order", ["", EXPANDED_ORDER], ids=["default", "expanded"])
@pytest.mark.parametrize("streams", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bf16_compute_stays_near(
    stored: RandomModel, plain: torch.Tensor, order: str, streams: torch.dtype
) -> None:
    """Rounding to 8 bits moves a random model's distribution little: a wrong formula gives a
    divergence of order 1."""
    ours = logits(
        stored,
        kernel_order=order,
        compute_dtype=torch.bfloat16,
        stream_dtype=streams,
    )
    assert divergence(plain, ours) < 5e-3


def test_quantised_weights_stay_small_and_expanded_ones_are_counted(stored: RandomModel) -> None:
    kept = {
        residency: load_model(
            stored.directory,
            stored.arch,
            kernel_order=order,
            compute_dtype=torch.bfloat16,
        ).weights_nbytes
        for residency, order in (("quantised", ""), ("expanded", EXPANDED_ORDER))
    }
    specs = [spec for spec in iterate(stored.arch) if not spec.name.startswith("mtp.")]
    on_disk = sum(spec.nbytes for spec in specs)
    is_quantised = any(spec.name.endswith(".scale") for spec in specs)
    # Some plain weights are kept in fp32, twice their size.
    assert 0.9 * on_disk < kept["quantised"] < 1.6 * on_disk
    assert is_quantised == (kept["expanded"] > 1.2 * kept["quantised"])
