"""Ranks that fail or end: told in a sentence; others go on where they can, and nobody is left."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import RequestError
from metainfer.core.events import EngineEvent, FinishEvent, FinishReason
from metainfer.llm import rank_crew, restarts
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.rank_crew import RankLostError
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.runner import Runner
from tests.fakes import fragile_ranks
from tests.fakes.engines import load_engine
from tests.fakes.random_models import HARD, RandomModel, layers, random_model
from tests.fakes.serving import wait_for

GOOD = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BAD = SamplingParams(temperature=0.5, seed=1, max_tokens=6, ignore_eos=True, top_k=13)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(**HARD, **layers(0, 4, hashed=1))
    return random_model(tmp_path_factory.mktemp("faults") / "model", config, seed=2)


@pytest.fixture
def born(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes of ranks, all of which must have ended when the test has."""
    pids: list[int] = []
    bear = rank_crew._born

    def noted(rank: int):
        member = bear(rank)
        pids.append(member.process.pid)
        return member

    monkeypatch.setattr(rank_crew, "_born", noted)
    yield pids
    assert pids
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def pair(model: RandomModel, **flags) -> Engine:
    return load_engine(model, tensor_parallel_size=2, max_num_seqs=2, **flags)


def ask(engine: Engine, model: RandomModel, params: SamplingParams = GOOD) -> Result:
    (result,) = generate(engine, [model.tokens(20)], params)
    return result


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


class Asked:
    """Requests of an engine and how they ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, FinishEvent] = {}

    def submit(self, model: RandomModel, max_tokens: int) -> str:
        name = uuid.uuid4().hex
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.tokens[name] = 0
        self._engine.submit(Request(name, tuple(model.tokens(20)), sampling, time.monotonic()))
        return name

    def until(self, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            for event in self._engine.events(0.05):
                self._take(event)
            return holds()

        wait_for(look, 90)

    def _take(self, event: EngineEvent) -> None:
        if isinstance(event, FinishEvent):
            self.ended[event.request_id] = event
        else:
            self.tokens[event.request_id] += 1


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
        for name in running:
            assert "rank 1 was ended by SIGKILL" in str(asked.ended[name].error)
        assert not any(name in asked.ended for name in waiting)
        given_up = asked.submit(model, 6)
        engine.abort(given_up)
        asked.until(lambda: given_up in asked.ended)  # while others wait
        assert asked.ended[given_up].reason is FinishReason.ABORT
        asked.until(lambda: all(name in asked.ended for name in waiting))
        assert all(asked.ended[name].reason is FinishReason.LENGTH for name in waiting)
        assert engine.stats().alive and engine.stats().restarts == 1
    assert len(born) == 2


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


def test_an_engine_is_closed_while_a_rank_is_started_anew(
    model: RandomModel, born: list[int]
) -> None:
    with pair(model):
        os.kill(born[0], signal.SIGKILL)
        time.sleep(1.2)  # a process is on its way
    assert not [one for one in threading.enumerate() if one.name == "engine"]


def engine_restarts(engine: Engine) -> restarts.Restarts:
    revive = engine._loop._revive
    assert isinstance(revive, restarts.Restarts)
    return revive
