"""Experts dealt over ranks, whole or in slices: the logits of one rank.

Ranks are threads here; those of processes move the same numbers.
"""

from __future__ import annotations

import pytest
import torch

from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.comm.group import Group
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.weights.load import Checkpoint
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model

TOLERANCE = 1e-5  # absolute, on logits of order 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, **HARD)
    return random_model(tmp_path_factory.mktemp("experts") / "model", config, seed=1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_quantised_config(
        o_groups=4, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, **HARD
    )
    return random_model(tmp_path_factory.mktemp("experts") / "model", config, seed=2)


def of_rank(
    model: RandomModel, group: Group | None = None, context: int = 1, expert: int = 1
) -> list[torch.Tensor]:
    """Prompts, chunks, and steps that decode: few rows and single ones go other ways than many."""
    loaded = load_model(
        model.directory, model.arch, kernel_order="", group=group, context=context, expert=expert
    )
    driver = Driver(loaded, model.arch)
    found = [driver.run(model.tokens(259, seed=1)), driver.run(model.tokens(400, seed=2), 143, 5)]
    tokens = model.tokens(150, seed=3)
    first, second = driver.start(), driver.start()
    found += driver.step((first, tokens[:131]), (second, tokens[:7]))
    found += driver.step((first, tokens[131:132]), (second, tokens[7:8]), decoding=2)
    found.append(driver.decode(tokens[132:137], first))
    return found


@pytest.fixture(scope="module")
def alone(plain: RandomModel, quantised: RandomModel) -> dict[str, list[torch.Tensor]]:
    return {"plain": of_rank(plain), "quantised": of_rank(quantised)}


@pytest.mark.parametrize(
    ("ranks", "context", "expert"), [(2, 1, 2), (4, 1, 4), (4, 1, 2), (2, 2, 2), (4, 2, 4)]
)
@pytest.mark.parametrize("name", ["plain", "quantised"])
def test_ranks_give_the_logits_of_one(
    request: pytest.FixtureRequest,
    alone: dict[str, list[torch.Tensor]],
    name: str,
    ranks: int,
    context: int,
    expert: int,
) -> None:
    model: RandomModel = request.getfixturevalue(name)
    assert {layer.router for layer in model.arch.layers} == {"hash", "learned"}
    found = run_ranks(virtual_groups(ranks), lambda group: of_rank(model, group, context, expert))
    for number, expected in enumerate(alone[name]):
        first = found[0][number]
        assert first.shape == expected.shape
        assert bool(((first - expected).abs() < TOLERANCE).all()), number
        assert all(torch.equal(other[number], first) for other in found[1:])


def test_a_rank_reads_its_own_experts_alone(quantised: RandomModel) -> None:
    arch, told = quantised.arch, []
    with Checkpoint.open(
        quantised.directory, arch, rank=3, size=4, expert=2, on_progress=lambda *n: told.append(n)
    ) as checkpoint:
        prefix, half = "layers.1.ffn.experts", arch.num_experts // 2
        own = range(half, arch.num_experts)
        w1 = checkpoint.experts(prefix, own)[0]
        assert w1.shape == (half, arch.moe_intermediate_size // 2, arch.hidden_size)
        whole = checkpoint.index.entries
    of_layer = [name for name in whole if name.startswith(f"{prefix}.")]
    taken = sum(whole[name].nbytes for name in of_layer if int(name.split(".")[4]) in own)
    assert told[-1][0] == taken
    elsewhere = sum(
        entry.nbytes
        for name, entry in whole.items()
        if ".ffn.experts." in name and int(name.split(".")[4]) not in own
    )
    assert told[-1][1] == sum(entry.nbytes for entry in whole.values()) - elsewhere
