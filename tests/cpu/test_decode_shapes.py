"""Decode steps of fixed shapes: the same logits, bit for bit, as steps that are cut to measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metainfer.arch.tiny import tiny_config, tiny_quantised_config
from metainfer.core.errors import MetainferError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.registry import Backend, Registry
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.cache import CacheStorage
from metainfer.ops.cache_formats import FP32_CACHES
from metainfer.ops.catalogue import OPS
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, Track, load_model
from tests.fakes.trimmed import trimming_registry

PROMPTS = (1, 2, 35, 127, 260)
BLOCKS = 4


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return random_model(tmp_path_factory.mktemp("fixed") / "model", tiny_config(**HARD), seed=1)


@pytest.fixture(scope="module", params=["*=reference", ""], ids=["reference", "default"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(random_weights: RandomModel, order: str) -> DeepseekV4:
    return load_model(random_weights.directory, random_weights.arch, kernel_order=order)


@pytest.fixture(scope="module")
def trimming_model(random_weights: RandomModel, order: str) -> DeepseekV4:
    return load_model(
        random_weights.directory,
        random_weights.arch,
        kernel_order=order,
        registry=trimming_registry(),
    )


def started(driver: Driver, weights: RandomModel, prompts: tuple[int, ...]) -> list[Track]:
    """A sequence for each prompt, prefilled."""
    tracks = [driver.start() for _ in prompts]
    for seed, (track, prompt) in enumerate(zip(tracks, prompts, strict=True)):
        driver.step((track, weights.tokens(prompt, seed)))
    return tracks


def drivers(model: DeepseekV4, weights: RandomModel, count: int) -> list[Driver]:
    slots = len(PROMPTS)
    return [Driver(model, weights.arch, num_slots=slots, num_blocks=24) for _ in range(count)]


def test_every_phase(trimming_model: DeepseekV4, random_weights: RandomModel) -> None:
    """At every residue of windows that close, with more room in tables than anybody needs."""
    cut, fixed = drivers(trimming_model, random_weights, 2)
    ours, theirs = (started(driver, random_weights, PROMPTS) for driver in (cut, fixed))
    tokens = random_weights.tokens(20, seed=9)
    for token in tokens:
        expected = cut.step(*((track, [token]) for track in ours), decoding=len(ours))
        got = fixed.fixed_step(
            *((track, [token]) for track in theirs), rows=len(PROMPTS), blocks=BLOCKS
        )
        assert torch.equal(torch.cat(got), torch.cat(expected))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_padding(model: DeepseekV4, random_weights: RandomModel, count: int) -> None:
    """Rows of padding beside some sequences: each of them gets what it gets in a full step, and
    nothing is written where any other sequence would see it. (Products of another number of rows
    are summed in another order, so that the full step has as many.)"""
    full, padded = drivers(model, random_weights, 2)
    ours, theirs = (started(driver, random_weights, PROMPTS) for driver in (full, padded))
    tokens = random_weights.tokens(9, seed=9)
    for token in tokens:
        expected = full.fixed_step(
            *((track, [token]) for track in ours), rows=len(PROMPTS), blocks=BLOCKS
        )
        got = padded.fixed_step(
            *((track, [token]) for track in theirs[:count]), rows=len(PROMPTS), blocks=BLOCKS
        )
        assert torch.equal(torch.cat(got), torch.cat(expected[:count]))
    # The others have not moved, and go on as if nothing had been.
    again = drivers(model, random_weights, 1)[0]
    alone = started(again, random_weights, PROMPTS)
    for token in tokens[:3]:
        late = padded.fixed_step(
            *((track, [token]) for track in theirs[count:]), rows=len(PROMPTS), blocks=BLOCKS
        )
        fresh = again.fixed_step(
            *((track, [token]) for track in alone[count:]), rows=len(PROMPTS), blocks=BLOCKS
        )
        assert torch.equal(torch.cat(late), torch.cat(fresh))


def test_padding_of_rows_in_fp8(tmp_path: Path) -> None:
    """Experts over codes leave rows of padding out, whatever the others choose."""
    random_weights = random_model(tmp_path / "model", tiny_quantised_config(), seed=2)
    chosen: list[torch.Tensor] = []

    def watched(backend: Backend) -> Backend:
        if backend.op != "moe.experts_fp8_rows":
            return backend

        def run(case, prepared, codes_TD, scales_TG, ids_TK, weights_TK):
            chosen.append(ids_TK)
            return backend.run(case, prepared, codes_TD, scales_TG, ids_TK, weights_TK)

        return replace(backend, run=run)

    registry = builtin_registry()
    model = load_model(
        random_weights.directory,
        random_weights.arch,
        registry=Registry(watched(b) for op in OPS for b in registry.backends(op).values()),
        activations="fp8",
    )
    full, padded = drivers(model, random_weights, 2)
    ours, theirs = (started(driver, random_weights, PROMPTS) for driver in (full, padded))
    for token in random_weights.tokens(3, seed=9):
        expected = full.fixed_step(
            *((track, [token]) for track in ours), rows=len(PROMPTS), blocks=BLOCKS
        )
        chosen.clear()
        got = padded.fixed_step(
            *((track, [token]) for track in theirs[:3]), rows=len(PROMPTS), blocks=BLOCKS
        )
        assert torch.equal(torch.cat(got), torch.cat(expected[:3]))
        assert chosen and all((ids[3:] == -1).all() and (ids[:3] >= 0).all() for ids in chosen)


def test_rows_of_drafts(random_weights: RandomModel) -> None:
    """Several rows of a sequence, of which some close windows."""
    arch = random_weights.arch
    model = load_model(
        random_weights.directory, arch, kernel_order="", draft_rows=3, registry=trimming_registry()
    )
    cut, fixed = (Driver(model, arch, draft_rows=3) for _ in range(2))
    ours, theirs = (started(driver, random_weights, (35, 126)) for driver in (cut, fixed))
    for seed in range(6):
        tokens = random_weights.tokens(6, seed)
        shares = (tokens[:2], tokens[2:])
        expected = cut.step(*zip(ours, shares, strict=True), decoding=2)
        got = fixed.fixed_step(*zip(theirs, shares, strict=True), rows=6, blocks=BLOCKS)
        assert torch.equal(torch.cat(got), torch.cat(expected))


def test_a_cache_without_spare_rows_is_refused(
    model: DeepseekV4, random_weights: RandomModel
) -> None:
    arch = random_weights.arch
    (driver,) = drivers(model, random_weights, 1)
    driver.cache = CacheStorage(
        arch, num_slots=1, num_blocks=1, formats=FP32_CACHES, draft_rows=0, device="cpu"
    )
    with pytest.raises(MetainferError, match="spare block"):
        driver.fixed_step((Track(0), [1]), rows=1, blocks=1)
