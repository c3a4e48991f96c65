"""A whole engine without a model: the real loop, scheduler and block pool over a shadow runner."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from metainfer.core.events import EngineEvent
from metainfer.llm.admission import Limits
from metainfer.llm.client import EngineStats
from metainfer.llm.loop import Loop
from metainfer.llm.request import Request
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.step import Step, StepOutput
from tests.fakes.shadow import ShadowRunner


class SlowShadow(ShadowRunner):
    """A shadow runner that waits before each step, so that clients can come and go meanwhile."""

    pause_s = 0.0

    def execute(self, step: Step) -> StepOutput:
        if self.pause_s:
            threading.Event().wait(self.pause_s)
        return super().execute(step)

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, AssertionError)  # the shadow complains: the books are wrong


class ShadowEngine:
    """An EngineClient whose tokens depend on the whole sequence before them and on nothing else;
    a wrong block, slot or order ends it."""

    def __init__(self, limits: Limits) -> None:
        self.runner = SlowShadow(limits.vocab_size, limits.max_num_batched_tokens)
        self._loop = Loop(Scheduler(limits), self.runner, check_every_step=True)
        self._thread = threading.Thread(target=self._loop.run, name="shadow-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> ShadowEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        self._thread.join()

    def submit(self, request: Request) -> None:
        self._loop.submit(request)

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    def events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        return self._loop.events(timeout_s)

    def stats(self) -> EngineStats:
        return self._loop.stats()
