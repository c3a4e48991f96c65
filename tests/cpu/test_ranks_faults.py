"""Ranks that fail: told in a sentence; the others go on where they can, and nobody is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.core.events import FinishReason
from metainfer.llm import rank_crew, restarts
from metainfer.llm.rank_crew import RankLostError
from metainfer.llm.request import SamplingParams
from metainfer.llm.runner import Runner
from tests.fakes import fragile_ranks
from tests.fakes.random_models import HARD, RandomModel, layers, random_model
from tests.fakes.rank_engines import ask, noted_ranks, pair

BAD = SamplingParams(temperature=0.5, seed=1, max_tokens=6, ignore_eos=True, top_k=13)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(**HARD, **layers(0, 4, hashed=1))
    return random_model(tmp_path_factory.mktemp("faults") / "model", config, seed=2)


@pytest.fixture
def born(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    with noted_ranks(monkeypatch) as pids:
        yield pids


@pytest.mark.parametrize(("body", "ahead"), [("refuses", False), ("has_no_logits", True)])
def test_a_step_that_fails_on_one_rank_fails_and_the_next_does_not(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int], body: str, ahead: bool
) -> None:
    monkeypatch.setattr(rank_crew, "work", getattr(fragile_ranks, body))
    with pair(model, async_scheduling=ahead) as engine:
        before = ask(engine, model)
        failed = ask(engine, model, BAD)
        assert failed.reason is FinishReason.ERROR and failed.error is not None
        assert "rank 1 failed: ValueError: " in failed.error and not failed.token_ids
        assert ask(engine, model).token_ids == before.token_ids
        assert engine.stats().alive and engine.stats().restarts == 0
    assert len(born) == 1


def test_a_step_that_fails_on_all_ranks_alike_costs_no_meeting(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int]
) -> None:
    monkeypatch.setattr(rank_crew, "work", fragile_ranks.refuses)
    monkeypatch.setattr(Runner, "launch", fragile_ranks.refusing)
    with pair(model) as engine:
        before = ask(engine, model)
        failed = ask(engine, model, BAD)
        assert failed.error is not None and failed.error.endswith("ValueError: a bad step")
        assert ask(engine, model).token_ids == before.token_ids


def test_a_rank_that_draws_otherwise_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int]
) -> None:
    monkeypatch.setattr(rank_crew, "work", fragile_ranks.draws_otherwise)
    monkeypatch.setattr(restarts, "PAUSES_S", ())
    with pair(model) as engine:
        failed = ask(engine, model, BAD)
        assert failed.reason is FinishReason.ERROR
        assert "rank 1 and rank 0 drew other tokens" in str(failed.error)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("exits_while_it_loads", "rank 1 ended with code 3"),
        ("cannot_load", "rank 1 could not load its part: MemoryError: not enough of it"),
    ],
)
def test_a_rank_that_does_not_start_is_named(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int], body: str, sentence: str
) -> None:
    monkeypatch.setattr(rank_crew, "work", getattr(fragile_ranks, body))
    with pytest.raises(RankLostError, match=sentence):
        pair(model)
