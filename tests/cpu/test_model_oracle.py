"""DeepseekV4 against the `transformers` package on random weights in fp32: every kind of layer
alone and all together, at lengths around every limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.bench.peer_transformers import PeerSession, load_peer
from metainfer.weights.load import Checkpoint
from tests.fakes.random_models import HARD, RandomModel, layers, random_model
from tests.fakes.steps import Driver, load_model

LENGTH = 300
# Around the window (16), entries of 4 and of 128 tokens, and the row that first sees 9 entries.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 35, 36, 37, 40, 127, 128, 129, 255, 256, 257)
TOLERANCE = 1e-5  # absolute, on logits of order 1

MODELS: dict[str, dict[str, Any]] = {
    "sliding": tiny_config(**layers(0, 0), **HARD),
    "hash": tiny_config(**layers(0, 0, hashed=2), **HARD),
    "compressed_sparse": tiny_config(**layers(4, 4), **HARD),
    "heavily_compressed": tiny_config(**layers(128, 128), **HARD),
    "all": tiny_config(**HARD),
    "all_released_constants": tiny_config(),
    "no_yarn": tiny_config(**layers(4, 128), rope_scaling=None),
    "other_widths": tiny_config(
        **layers(4, 128, 0, hashed=1),
        hidden_size=48,
        num_attention_heads=6,
        o_groups=3,
        head_dim=24,
        qk_rope_head_dim=12,
        q_lora_rank=20,
        sliding_window=5,
        index_n_heads=32,
        index_topk=3,
        n_routed_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RandomModel, torch.Tensor]:
    """A model and what transformers says of LENGTH tokens, [T, V]."""
    directory = tmp_path_factory.mktemp(request.param) / "model"
    model = random_model(directory, MODELS[request.param], seed=11)
    return model, peer_logits(model, model.tokens(LENGTH))


def peer_logits(model: RandomModel, tokens: list[int]) -> torch.Tensor:
    with Checkpoint.open(model.directory, model.arch) as checkpoint:
        peer = load_peer(model.directory, checkpoint, torch.float32)
    with torch.inference_mode():
        return peer(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())  # NaN if one is


def test_one_shot_at_every_length(case: tuple[RandomModel, torch.Tensor]) -> None:
    model, expected = case
    driver = Driver(load_model(model.directory, model.arch), model.arch)
    assert expected.std() > 0.3
    for length in (*LENGTHS, LENGTH):
        logits = driver.run(model.tokens(LENGTH)[:length])
        assert largest_difference(logits, expected[:length]) < TOLERANCE, length


def test_prompt_then_token_by_token(case: tuple[RandomModel, torch.Tensor]) -> None:
    model, expected = case
    tokens = model.tokens(LENGTH)
    driver = Driver(load_model(model.directory, model.arch), model.arch)
    for prompt in (1, 14, 126, 250):
        sequence = driver.start()
        (first,) = driver.step((sequence, tokens[:prompt]))
        rest = driver.decode(tokens[prompt : prompt + 10], sequence)
        logits = torch.cat([first, rest])
        assert largest_difference(logits, expected[: prompt + 10]) < TOLERANCE, prompt
        driver.finish(sequence)


def test_default_kernels(case: tuple[RandomModel, torch.Tensor]) -> None:
    model, expected = case
    driver = Driver(load_model(model.directory, model.arch, kernel_order=""), model.arch)
    logits = driver.run(model.tokens(LENGTH), 130, 1, 60)
    assert largest_difference(logits, expected) < TOLERANCE


def test_transformers_with_its_cache_decodes_the_same_tokens(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", MODELS["all"], seed=4)
    prompt, count = model.tokens(120), 20
    with Checkpoint.open(model.directory, model.arch) as checkpoint:
        peer = load_peer(model.directory, checkpoint, torch.float32)
    expected = PeerSession(peer).greedy(prompt, count)

    driver = Driver(load_model(model.directory, model.arch), model.arch)
    sequence = driver.start()
    (logits,) = driver.step((sequence, prompt))
    ids = [int(logits[-1].argmax())]
    while len(ids) < count:
        ids.append(int(driver.decode(ids[-1:], sequence)[0].argmax()))
    assert ids == expected


def test_released_formats_compute_what_their_numbers_say(tmp_path: Path) -> None:
    """fp8 blocks and fp4 experts, computed in fp32, against transformers on dequantised weights;
    with an MTP block, which is not used."""
    model = random_model(tmp_path / "model", tiny_quantised_config(**HARD), seed=6)
    tokens = model.tokens(200)
    expected = peer_logits(model, tokens)
    for order in ("*=reference", ""):
        driver = Driver(load_model(model.directory, model.arch, kernel_order=order), model.arch)
        assert largest_difference(driver.run(tokens, 77), expected) < TOLERANCE, order
    with Checkpoint.open(model.directory, model.arch) as checkpoint:
        assert checkpoint.unused
