"""A pipeline of stages, each with some of the layers: the logits of one rank.

Ranks are threads here; those of processes move the same numbers (`test_ranks_stages`).
"""

from __future__ import annotations

import pytest
import torch

from metainfer.arch.stages import place_of, stage_layers
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
    return random_model(tmp_path_factory.mktemp("stages") / "model", config, seed=1)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_quantised_config(
        o_groups=4, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, **HARD
    )
    return random_model(tmp_path_factory.mktemp("stages") / "model", config, seed=2)


def of_rank(
    model: RandomModel,
    group: Group | None = None,
    context: int = 1,
    stages: int = 1,
    **more: str,
) -> list[torch.Tensor]:
    """Prompts in chunks, of which only some rows are wanted; then some decode, in a step of fixed
    shape too; one loses its cache and is computed again."""
    ranks = {"group": group, "context": context, "stages": stages}
    loaded = load_model(model.directory, model.arch, **{"kernel_order": "", **ranks, **more})
    driver = Driver(loaded, model.arch)
    found = [driver.run(model.tokens(259, seed=1)), driver.run(model.tokens(400, seed=2), 143, 5)]
    tokens = model.tokens(150, seed=3)
    first, second = driver.start(), driver.start()
    found += driver.step((first, tokens[:131]), (second, tokens[:7]), wanted=[2, 1])
    found += driver.step((first, tokens[131:132]), (second, tokens[7:8]), decoding=2)
    found += driver.fixed_step((first, tokens[132:133]), (second, tokens[8:9]), rows=4, blocks=2)
    driver.finish(first)
    driver.poison([second])
    again = driver.start()
    found += driver.step((second, tokens[9:10]), (again, tokens[:90]), decoding=1)
    found += driver.step((second, tokens[10:11]), (again, tokens[90:133]), decoding=1)
    found.append(driver.decode(tokens[133:136], again))
    return found


@pytest.fixture(scope="module")
def alone(plain: RandomModel, quantised: RandomModel) -> dict[str, list[torch.Tensor]]:
    return {"plain": of_rank(plain), "quantised": of_rank(quantised)}


@pytest.mark.parametrize(
    ("name", "ranks", "context", "stages"),
    [
        ("plain", 2, 1, 2),
        ("plain", 4, 1, 4),
        ("plain", 4, 2, 2),
        ("quantised", 2, 1, 2),
        ("quantised", 4, 1, 2),
    ],
)
def test_stages_give_the_logits_of_one_rank(
    request: pytest.FixtureRequest,
    alone: dict[str, list[torch.Tensor]],
    name: str,
    ranks: int,
    context: int,
    stages: int,
) -> None:
    model: RandomModel = request.getfixturevalue(name)
    found = run_ranks(virtual_groups(ranks), lambda group: of_rank(model, group, context, stages))
    of_last = [
        own for rank, own in enumerate(found) if place_of(rank, ranks, stages)[0] + 1 == stages
    ]
    assert found[0] is of_last[0]
    for number, expected in enumerate(alone[name]):
        assert of_last[0][number].shape == expected.shape
        assert bool(((of_last[0][number] - expected).abs() < TOLERANCE).all()), number
        assert all(torch.equal(other[number], of_last[0][number]) for other in of_last)


def test_stages_of_rounded_rows_give_the_bits_of_one_rank(quantised: RandomModel) -> None:
    """What the last sublayer of a stage gave is written before it is handed on; on one rank the
    next one writes it while it reads."""
    more = {"activations": "fp8", "kernel_order": "*=reference"}
    expected = of_rank(quantised, **more)
    found = run_ranks(virtual_groups(2), lambda group: of_rank(quantised, group, stages=2, **more))
    for ours, theirs in zip(found[0], expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_stage_has_its_part_of_weights_and_caches_only(plain: RandomModel) -> None:
    arch = plain.arch

    def of_stage(group: Group) -> tuple[int, int, int, int]:
        model = load_model(plain.directory, arch, group=group, stages=2)
        told: list[tuple[int, int]] = []
        with Checkpoint.open(
            plain.directory, arch, stage=model.stage, on_progress=lambda *both: told.append(both)
        ) as checkpoint:
            for name in filter(model.stage.has, set(checkpoint.index.entries)):
                if not name.startswith("mtp."):
                    checkpoint.tensor(name)
        return model.weights_nbytes, Driver(model, arch).cache.nbytes, *told[-1]

    whole = load_model(plain.directory, arch)
    found = run_ranks(virtual_groups(2), of_stage)
    assert sum(weights for weights, *_ in found) == whole.weights_nbytes
    assert sum(cache for _, cache, *_ in found) == Driver(whole, arch).cache.nbytes
    assert all(done == total for *_, done, total in found)
    assert [len(layers) for layers in stage_layers(43, 4)] == [11, 11, 11, 10]
