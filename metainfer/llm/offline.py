"""Offline: a batch of prompts in, their results out, for benches, tests and notebooks."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.core.errors import RequestError
from metainfer.core.events import (
    EngineEvent,
    FinishEvent,
    FinishReason,
    PromptEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from metainfer.llm.client import EngineClient
from metainfer.llm.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Result:
    """What one prompt gave. `logprobs`, `prompt_logprobs`: see SamplingParams.

    Attributes:
        reason: how it ended; with ERROR, `error` is a sentence.
        stop_token_id, stop_logprob: of the token that ended it, which `token_ids` is without.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    stop_logprob: TokenLogprob | None = None
    error: str | None = None


def generate(
    client: EngineClient,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[Result]:
    """The results of `prompts` (token ids), in their order. Nobody else may read the client's
    events meanwhile; those of other requests are dropped.

    Args:
        sampling: for all prompts, or one for each.

    Raises:
        RequestError: a prompt can never be served, or the engine has stopped; nothing runs on.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    batch = uuid.uuid4().hex
    collectors = {f"{batch}-{n}": _Collector() for n in range(len(prompts))}
    waiting = deque(
        Request(name, tuple(prompt), params, time.monotonic())
        for name, prompt, params in zip(collectors, prompts, each, strict=True)
    )
    try:
        while any(collector.result is None for collector in collectors.values()):
            _submit(client, waiting)
            events = client.events()
            if not events and not client.stats().alive:
                raise RequestError("the engine has stopped", code="engine_stopped", status=503)
            for event in events:
                if event.request_id in collectors:
                    collectors[event.request_id].take(event)
    except BaseException:
        for name in collectors:
            client.abort(name)
        raise
    return [collector.result for collector in collectors.values() if collector.result is not None]


def _submit(client: EngineClient, waiting: deque[Request]) -> None:
    """Submit as many as the queue takes."""
    while waiting:
        try:
            client.submit(waiting[0])
        except RequestError as error:
            if error.code == "queue_full":
                return  # there will be room after the next event
            raise
        waiting.popleft()


class _Collector:
    """Gathers the events of one request."""

    def __init__(self) -> None:
        self.result: Result | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    def take(self, event: EngineEvent) -> None:
        match event:
            case PromptEvent():
                self._prompt_logprobs = event.logprobs
            case TokenEvent():
                self._token_ids += event.token_ids
                self._logprobs += event.logprobs
            case FinishEvent():
                self.result = Result(
                    tuple(self._token_ids),
                    tuple(self._logprobs),
                    self._prompt_logprobs,
                    event.reason,
                    event.usage,
                    event.stop_token_id,
                    event.stop_logprob,
                    event.error,
                )
