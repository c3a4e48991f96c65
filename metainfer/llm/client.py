"""EngineClient: the four verbs between whoever serves and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from metainfer.core.events import EngineEvent
from metainfer.llm.request import Request


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Counters grow for ever; gauges are as of now."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_free_slots: int
    num_slots: int
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    num_finished: int
    num_aborted: int
    num_errors: int
    alive: bool
    kernels_compiled: int = 0  # while requests were served, which held them up
    decodes_without_graph: int = 0  # decode steps that should have had one
    restarts: int = 0  # of ranks, after one was lost
    ready: bool = True  # requests are computed; False while ranks are started anew


class EngineClient(Protocol):
    """submit, abort, events, stats. All are safe to call from any thread."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError at once if it can never be served, or if the queue
        is full (status 429)."""

    def abort(self, request_id: str) -> None:
        """End a request early; a FinishEvent with reason ABORT follows. Unknown ids are ignored."""

    def events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        """The events since the last call, in order; waits up to `timeout_s` (None: until there is
        one) and returns an empty sequence on time-out. One consumer."""

    def stats(self) -> EngineStats: ...
