"""Prefill sharded over tokens, decode by heads: the logits of one rank.

Ranks are threads here; those of processes move the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.comm.group import Group
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.plan.ledger import weights_bytes
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model

TOLERANCE = 1e-5  # absolute, on logits of order 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, **HARD)
    return random_model(tmp_path_factory.mktemp("tokens") / "model", config, seed=1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_quantised_config(
        o_groups=4, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, **HARD
    )
    return random_model(tmp_path_factory.mktemp("tokens") / "model", config, seed=2)


def whole(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Prompts of odd lengths, each in one step; short ones are computed by heads."""
    return [driver.run(model.tokens(length, seed=length)) for length in (127, 385, 771)]


def chunked(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Chunks begin and end at any place of a window; some are too short to be shared."""
    lengths = ((401, 3, 515), (512, 385, 17))
    return [driver.run(model.tokens(930, seed=5), *parts) for parts in lengths]


def together(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Several prompts in a step, of which only some rows are wanted; then all decode."""
    prompts = (300, 64, 555)
    tokens = [model.tokens(length + 150, seed=length) for length in prompts]
    sequences = [driver.start() for _ in prompts]
    parts = [
        (sequence, own[:length])
        for sequence, own, length in zip(sequences, tokens, prompts, strict=True)
    ]
    found = driver.step(*parts, wanted=[1, 0, 260])
    for step in range(5):
        decoding = [
            (sequence, [own[length + step]])
            for sequence, own, length in zip(sequences, tokens, prompts, strict=True)
        ]
        found += driver.step(*decoding, decoding=len(decoding))
    for sequence in sequences:
        driver.finish(sequence)
    return found


def of_rank(model: RandomModel, group: Group | None = None, context: int = 1) -> list[torch.Tensor]:
    loaded = load_model(model.directory, model.arch, kernel_order="", group=group, context=context)
    driver = Driver(loaded, model.arch)
    bodies: tuple[Callable[[Driver, RandomModel], list[torch.Tensor]], ...] = (
        whole, chunked, together,
    )  # fmt: skip
    return [logits for body in bodies for logits in body(driver, model)]


@pytest.fixture(scope="module")
def alone(plain: RandomModel, quantised: RandomModel) -> dict[str, list[torch.Tensor]]:
    return {"plain": of_rank(plain), "quantised": of_rank(quantised)}


@pytest.mark.parametrize(
    ("name", "ranks", "context"), [("plain", 4, 2), ("quantised", 2, 2), ("quantised", 4, 4)]
)
def test_ranks_give_the_logits_of_one(
    request: pytest.FixtureRequest,
    alone: dict[str, list[torch.Tensor]],
    name: str,
    ranks: int,
    context: int,
) -> None:
    model: RandomModel = request.getfixturevalue(name)
    found = run_ranks(virtual_groups(ranks), lambda group: of_rank(model, group, context))
    for number, expected in enumerate(alone[name]):
        first = found[0][number]
        assert first.shape == expected.shape
        assert bool(((first - expected).abs() < TOLERANCE).all()), number
        assert all(torch.equal(other[number], first) for other in found[1:])


def test_the_ledger_counts_what_ranks_keep(quantised: RandomModel) -> None:
    """Within a few vectors, where backends keep weights as their files do."""

    def kept(group: Group) -> int:
        args = quantised.directory, quantised.arch
        return load_model(
            *args, kernel_order="*=cpu,reference", group=group, context=2
        ).weights_nbytes

    planned = weights_bytes(quantised.arch, "quantised", "float32", 2, 2)
    assert run_ranks(virtual_groups(2), kept) == pytest.approx([planned] * 2, rel=0.03)
