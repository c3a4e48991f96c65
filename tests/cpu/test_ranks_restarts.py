"""Ranks that end, however and whenever: all are started anew while requests wait."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import RequestError
from metainfer.core.events import FinishReason
from metainfer.llm import rank_crew, ranks, start_ranks
from tests.fakes import fragile_ranks
from tests.fakes.random_models import HARD, RandomModel, layers, random_model
from tests.fakes.rank_engines import Asked, ask, engine_restarts, noted_ranks, pair
from tests.fakes.serving import wait_for

STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(**HARD, **layers(0, 4, hashed=1))
    return random_model(tmp_path_factory.mktemp("faults") / "model", config, seed=2)


@pytest.fixture
def born(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    with noted_ranks(monkeypatch) as pids:
        yield pids


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often; `make soak` asks for more."""
    return int(request.config.getoption("--kills"))


def test_a_rank_that_is_killed_is_started_anew_while_requests_wait(
    model: RandomModel, born: list[int]
) -> None:
    with pair(model, max_queued_requests=8) as engine:
        asked = Asked(engine)
        running = [asked.submit(model, 600) for _ in range(2)]
        waiting = [asked.submit(model, 6) for _ in range(2)]
        asked.until(lambda: all(asked.tokens[name] > 2 for name in running))
        os.kill(born[0], signal.SIGKILL)
        asked.until(lambda: all(name in asked.ended for name in running))
        assert engine.stats().alive and not engine.stats().ready
        for name in running:
            assert "rank 1 was ended by SIGKILL" in str(asked.ended[name].error)
        assert not any(name in asked.ended for name in waiting)
        given_up = asked.submit(model, 6)
        engine.abort(given_up)
        asked.until(lambda: given_up in asked.ended)  # while others wait
        assert asked.ended[given_up].reason is FinishReason.ABORT
        asked.until(lambda: all(name in asked.ended for name in waiting))
        assert all(asked.ended[name].reason is FinishReason.LENGTH for name in waiting)
        assert engine.stats().ready and engine.stats().restarts == 1
    assert len(born) == 2


@pytest.mark.soak
def test_a_rank_that_stands_still_is_named_and_started_anew(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int]
) -> None:
    monkeypatch.setattr(start_ranks, "DEADLINE_S", 5.0)
    monkeypatch.setattr(ranks, "_LONGEST_END_S", 1.0)
    with pair(model) as engine:
        before = ask(engine, model)
        os.kill(born[0], signal.SIGSTOP)
        failed = ask(engine, model)
        assert failed.error is not None and "rank 1 did not answer" in failed.error
        assert ask(engine, model).token_ids == before.token_ids


@pytest.mark.parametrize("flags", [{}, STAGES], ids=["heads", "stages"])
def test_ranks_that_are_killed_at_random_moments(
    monkeypatch: pytest.MonkeyPatch,
    model: RandomModel,
    born: list[int],
    kills: int,
    flags: dict[str, int],
) -> None:
    """While they compute, while they wait, while they load: every request ends, and the last one
    as if nothing had been."""
    luck = random.Random(kills)
    with pair(model, **flags) as engine:
        monkeypatch.setattr(engine_restarts(engine), "_pauses_s", (0.0,) * 1000)
        before = ask(engine, model)
        for _ in range(kills):
            asked = Asked(engine)
            names = [asked.submit(model, luck.randrange(1, 40)) for _ in range(2)]
            time.sleep(luck.random() * luck.choice((0.05, 0.5, 5.0)))
            with suppress(ProcessLookupError):
                os.kill(born[-1], signal.SIGKILL)
            asked.until_all_ended()
            assert {asked.ended[name].reason for name in names} <= {
                FinishReason.LENGTH, FinishReason.ERROR,
            }  # fmt: skip
        last = ask(engine, model)
        if last.reason is FinishReason.ERROR:  # nobody had asked since the last one was killed
            last = ask(engine, model)
        assert last.token_ids == before.token_ids
    assert len(born) > 1


@pytest.mark.soak
def test_an_idle_engine_whose_rank_ends_too_often_stops_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, born: list[int]
) -> None:
    with pair(model) as engine:
        # What is started anew does not live.
        monkeypatch.setattr(rank_crew, "work", fragile_ranks.exits_while_it_loads)
        monkeypatch.setattr(engine_restarts(engine), "_pauses_s", (0.01, 0.01))
        os.kill(born[0], signal.SIGTERM)
        wait_for(lambda: not engine.stats().alive, 90)
        with pytest.raises(RequestError, match="rank 1 ended with code 3; 2 restarts did not help"):
            ask(engine, model)


@pytest.mark.soak
def test_an_engine_is_closed_while_a_rank_is_started_anew(
    model: RandomModel, born: list[int]
) -> None:
    with pair(model):
        os.kill(born[0], signal.SIGKILL)
        time.sleep(1.2)  # a process is on its way
    assert not [one for one in threading.enumerate() if one.name == "engine"]
