"""An engine of stages, whose ranks are processes: it gives what an engine of one rank gives, its
stages compute at the same time, and a stage that fails is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import UserError
from metainfer.core.events import FinishReason
from metainfer.llm import rank_crew, restarts
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import SamplingParams
from metainfer.llm.runner import Runner
from metainfer.llm.step import Step
from tests.cpu.test_ranks_engine import ASKED, FLAGS, ask, assert_same
from tests.fakes import fragile_ranks
from tests.fakes.engines import load_engine
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.rank_engines import Asked, noted_ranks
from tests.fakes.rank_engines import ask as ask_one
from tests.fakes.serving import wait_for

BAD = SamplingParams(temperature=0.5, seed=1, max_tokens=6, ignore_eos=True, top_k=13)
LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, **HARD)
    return random_model(tmp_path_factory.mktemp("stages") / "model", config, seed=2)


@pytest.fixture(scope="module")
def expected(model: RandomModel) -> list[Result]:
    with load_engine(model, **FLAGS) as engine:
        return ask(engine, model)


@pytest.fixture
def born(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    with noted_ranks(monkeypatch) as pids:
        yield pids


def staged(model: RandomModel, **flags) -> Engine:
    return load_engine(model, pipeline_parallel_size=2, **flags)


def test_two_stages_give_what_one_rank_gives(model: RandomModel, expected: list[Result]) -> None:
    """Prompts in chunks, sequences that lose their cache, all ways to sample, and prompts that are
    scored while other steps are in flight."""
    with staged(model, **FLAGS) as engine:
        assert engine.plan.ranks == 2
        assert_same(ask(engine, model), expected)
        stats = engine.stats()
        assert stats.alive and stats.num_preemptions > 0 and stats.num_errors == 0

        asked = Asked(engine)
        first = asked.submit(model, 400)
        asked.until(lambda: asked.tokens[first] > 3)
        engine.abort(first)
        asked.submit(model, 5)
        asked.until_all_ended()
        assert asked.ended[first].reason is FinishReason.ABORT
        assert_same(ask(engine, model), expected)


def test_stages_of_two_ranks_with_whole_experts_and_steps_ahead(
    model: RandomModel, expected: list[Result]
) -> None:
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "async_scheduling": True}
    with staged(model, **ranks, **FLAGS) as engine:
        assert engine.plan.ranks == 4 and engine.plan.expert_parallel_size.value == 2
        found = ask(engine, model, [(n, replace(p, max_tokens=5)) for n, p in ASKED])
    for few, whole in zip(found, expected, strict=True):
        assert few.error is None and few.token_ids == whole.token_ids[:5]


def test_stages_compute_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: RandomModel
) -> None:
    """The last stage does not begin a step before the first one has begun the step behind it."""
    monkeypatch.setenv(fragile_ranks.NOTES, str(tmp_path))
    monkeypatch.setattr(rank_crew, "work", fragile_ranks.notes_steps)
    launch, met = Runner.launch, []

    def launch_behind(runner: Runner, step: Step):
        if step.num_decode_sequences and len(met) < 8:
            wait_for((tmp_path / str(step.step_id + 1)).exists)
            met.append(step.step_id)
        return launch(runner, step)

    with staged(model) as engine:
        for note in tmp_path.iterdir():  # of steps ahead of the first request
            note.unlink()
        monkeypatch.setattr(Runner, "launch", launch_behind)
        results = generate(engine, [model.tokens(9), model.tokens(5)], LONG)
    assert [len(result.token_ids) for result in results] == [12, 12] and len(met) == 8


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_is_named_and_the_next_step_works(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int], rank: int
) -> None:
    if rank == 0:
        monkeypatch.setattr(Runner, "launch", fragile_ranks.refusing)
    else:
        monkeypatch.setattr(rank_crew, "work", fragile_ranks.refuses)
    with staged(model) as engine:
        before = ask_one(engine, model)
        asked = Asked(engine)
        beside = asked.submit(model, 30)
        asked.until(lambda: asked.tokens[beside] > 0)
        failed = ask_one(engine, model, BAD)
        assert failed.reason is FinishReason.ERROR and not failed.token_ids
        assert str(failed.error).endswith("ValueError: a bad step")
        assert ("rank 1" in str(failed.error)) == (rank == 1)
        assert ask_one(engine, model).token_ids == before.token_ids
        assert engine.stats().alive and engine.stats().restarts == 0
    assert len(born) == 1


@pytest.mark.soak
def test_a_stage_that_ends_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int]
) -> None:
    monkeypatch.setattr(restarts, "PAUSES_S", (0.0,))
    with staged(model, max_num_seqs=2) as engine:
        before = ask_one(engine, model)
        asked = Asked(engine)
        running = asked.submit(model, 4000)
        asked.until(lambda: asked.tokens[running] > 3)
        os.kill(born[0], signal.SIGKILL)
        asked.until_all_ended()
        assert "rank 1 was ended by SIGKILL" in str(asked.ended[running].error)
        assert ask_one(engine, model).token_ids == before.token_ids
        assert engine.stats().restarts == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"pipeline_parallel_size": 40}, "asks for more stages than the"),
        ({"expert_parallel_size": 3, "tensor_parallel_size": 2}, "over 3 parts of 2 ranks"),
        ({"expert_parallel_size": 2}, "over 2 parts of 1 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: RandomModel, flags: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_engine(model, **flags)
