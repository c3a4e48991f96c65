"""Engines over random miniatures, and a client that gives an engine more to do than was asked."""

from __future__ import annotations

import time
from collections.abc import Sequence

from metainfer.core.events import EngineEvent, FinishEvent, TokenEvent
from metainfer.llm.client import EngineClient, EngineStats
from metainfer.llm.engine import Engine
from metainfer.llm.request import Request, SamplingParams
from metainfer.plan.settings import EngineSettings
from tests.fakes.random_models import RandomModel


def load_engine(model: RandomModel, **flags) -> Engine:
    """An engine that checks its books after every step; `flags` are those of EngineSettings."""
    flags = {"device": "cpu", "max_model_len": 640, "max_num_seqs": 4, "threads": 1, **flags}
    return Engine.load(model.directory, EngineSettings(**flags), check_every_step=True)


class WithStrangers:
    """An EngineClient with other requests of its own, each aborted after a few of its tokens.

    They go before the requests that were asked; the next comes when one has ended.

    Args:
        strangers: prompts.
        tokens: a stranger is aborted once it has so many; the number goes down to 0, where it is
            aborted right after it was submitted, and then starts again.
    """

    def __init__(
        self,
        client: EngineClient,
        strangers: Sequence[Sequence[int]],
        tokens: int,
        at_once: int = 2,
    ) -> None:
        self.num_aborted = 0
        self._client = client
        self._prompts = list(strangers)
        self._most = tokens
        self._left: dict[str, int] = {}  # tokens until the abort
        for _ in range(at_once):
            self._next_stranger()

    def submit(self, request: Request) -> None:
        self._client.submit(request)

    def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    def events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        events = self._client.events(timeout_s)
        for event in events:
            if event.request_id not in self._left:
                continue
            if isinstance(event, TokenEvent):
                self._left[event.request_id] -= len(event.token_ids)
                if self._left[event.request_id] <= 0:
                    self._client.abort(event.request_id)
            elif isinstance(event, FinishEvent):
                self.num_aborted += event.reason == "abort"
                self._next_stranger()
        return events

    def stats(self) -> EngineStats:
        return self._client.stats()

    def _next_stranger(self) -> None:
        if not self._prompts:
            return
        name = f"stranger-{len(self._prompts)}"
        self._left[name] = len(self._prompts) % (self._most + 1)
        sampling = SamplingParams(max_tokens=200, ignore_eos=True, seed=len(self._prompts))
        prompt = tuple(self._prompts.pop())
        self._client.submit(Request(name, prompt, sampling, time.monotonic(), -1))
        if self._left[name] == 0:
            self._client.abort(name)
