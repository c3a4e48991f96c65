"""The model over several ranks against one: heads, experts and head divided, the same logits.

Ranks are threads here; those of processes move the same numbers (`test_ranks_engine`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metainfer.arch.split import check_split
from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.comm.group import Group
from metainfer.comm.virtual import run_ranks, virtual_groups
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model

TOLERANCE = 1e-5  # absolute, on logits of order 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, **HARD)
    return random_model(tmp_path_factory.mktemp("ranks") / "model", config, seed=1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Ranks have parts of blocks of scales: 128 columns of experts over 2 or 4."""
    config = tiny_quantised_config(
        o_groups=4, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, **HARD
    )
    return random_model(tmp_path_factory.mktemp("ranks") / "model", config, seed=2)


def whole(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Prompts of odd lengths, each in one step."""
    return [driver.run(model.tokens(length, seed=length)) for length in (1, 127, 259)]


def chunked(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    return [driver.run(model.tokens(263), *lengths) for lengths in ((15, 1, 17, 3, 200), (128, 5))]


def decoded(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """Sequences of different lengths, together in every step; one begins beside those."""
    prompts = (1, 35, 130)
    tokens = [model.tokens(160, seed) for seed in range(len(prompts))]
    sequences = [driver.start() for _ in prompts]
    found = []
    for sequence, prompt, own in zip(sequences, prompts, tokens, strict=True):
        found += driver.step((sequence, own[:prompt]))
    late, later = driver.start(), model.tokens(40, 9)
    for step in range(7):
        parts = [
            (sequence, [own[prompt + step]])
            for sequence, prompt, own in zip(sequences, prompts, tokens, strict=True)
        ]
        chunk = (late, later[5 * step : 5 * step + 5])
        found += driver.step(*parts, chunk, decoding=len(parts))
    for sequence in (*sequences, late):
        driver.finish(sequence)
    return found


def preempted(driver: Driver, model: RandomModel) -> list[torch.Tensor]:
    """A sequence loses its cache and is computed again, in chunks that fall elsewhere."""
    tokens = model.tokens(150, seed=3)
    first, beside = driver.start(), driver.start()
    found = driver.step((first, tokens[:131]), (beside, tokens[:7]))
    driver.finish(first)
    driver.poison([beside])
    again = driver.start()
    for start, end in ((0, 50), (50, 133)):
        found += driver.step((beside, [tokens[0]]), (again, tokens[start:end]), decoding=1)
    found.append(driver.decode(tokens[133:], again))
    for sequence in (again, beside):
        driver.finish(sequence)
    return found


def of_rank(model: RandomModel, group: Group | None = None) -> list[torch.Tensor]:
    loaded = load_model(model.directory, model.arch, kernel_order="", group=group)
    driver = Driver(loaded, model.arch)
    bodies: tuple[Callable[[Driver, RandomModel], list[torch.Tensor]], ...] = (
        whole, chunked, decoded, preempted,
    )  # fmt: skip
    return [logits for body in bodies for logits in body(driver, model)]


@pytest.fixture(scope="module")
def alone(plain: RandomModel, quantised: RandomModel) -> dict[str, list[torch.Tensor]]:
    return {"plain": of_rank(plain), "quantised": of_rank(quantised)}


@pytest.mark.parametrize(("name", "ranks"), [("plain", 2), ("quantised", 4)])
def test_ranks_give_the_logits_of_one(
    request: pytest.FixtureRequest, alone: dict[str, list[torch.Tensor]], name: str, ranks: int
) -> None:
    model: RandomModel = request.getfixturevalue(name)
    check_split(model.arch, ranks)
    found = run_ranks(virtual_groups(ranks), lambda group: of_rank(model, group))
    for number, expected in enumerate(alone[name]):
        first = found[0][number]
        assert first.shape == expected.shape
        assert bool(((first - expected).abs() < TOLERANCE).all()), number
        assert all(torch.equal(other[number], first) for other in found[1:])
