"""Engines of two ranks, whose processes a test knows and may end, and their requests."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from metainfer.core.events import EngineEvent, FinishEvent
from metainfer.llm import rank_crew, restarts
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import Request, SamplingParams
from tests.fakes.engines import load_engine
from tests.fakes.random_models import RandomModel
from tests.fakes.serving import wait_for

GOOD = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@contextmanager
def noted_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes of ranks that are born meanwhile, all of which must have ended afterwards."""
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
    return load_engine(model, **{"tensor_parallel_size": 2, "max_num_seqs": 2, **flags})


def ask(engine: Engine, model: RandomModel, params: SamplingParams = GOOD) -> Result:
    (result,) = generate(engine, [model.tokens(20)], params)
    return result


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

    def until_all_ended(self) -> None:
        self.until(lambda: self.ended.keys() == self.tokens.keys())

    def _take(self, event: EngineEvent) -> None:
        if isinstance(event, FinishEvent):
            self.ended[event.request_id] = event
        else:
            self.tokens[event.request_id] += 1


def engine_restarts(engine: Engine) -> restarts.Restarts:
    revive = engine._loop._revive
    assert isinstance(revive, restarts.Restarts)
    return revive
