"""This engine as a contender: the whole way of a request, from submission to its events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from metainfer.arch.families import read_arch
from metainfer.bench.contender import Prompts, Timing
from metainfer.core.errors import MetainferError
from metainfer.core.events import FinishEvent, FinishReason, TokenEvent
from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import Request, SamplingParams
from metainfer.plan.settings import EngineSettings

_SPARE_TOKENS = 64
"""Room for what sequences generate while others of their batch are still in prefill."""


class EngineContender:
    """The engine as `serve` starts it, but for the sizes, which are those of the work."""

    def __init__(
        self, directory: Path, threads: int, max_model_len: int, max_num_seqs: int
    ) -> None:
        longest = min(max_model_len + _SPARE_TOKENS, read_arch(directory).max_model_len)
        settings = EngineSettings(threads=threads, max_model_len=longest, max_num_seqs=max_num_seqs)
        self._engine = Engine.load(directory, settings)

    @property
    def dtype(self) -> str:
        return self._engine.plan.compute_dtype.value

    def close(self) -> None:
        self._engine.close()

    def prefill(self, prompt: Sequence[int]) -> Timing:
        started_s = time.perf_counter()
        arrivals = [now_s for _, now_s in self._tokens([prompt], 1)]
        return Timing(len(prompt), arrivals[0] - started_s)

    def decode(self, prompts: Prompts, count: int) -> Timing:
        """Timed are the first so many tokens that come once all sequences have one: whoever was
        first out of prefill runs on until then, so that the whole batch runs all the time."""
        wanted = len(prompts) * (count - 1)
        without_token = set(range(len(prompts)))
        tokens, started_s, ended_s = 0, 0.0, 0.0
        for index, now_s in self._tokens(prompts, count + _SPARE_TOKENS):
            if without_token:
                without_token.discard(index)
                started_s = now_s
            else:
                tokens, ended_s = tokens + 1, now_s
            if tokens == wanted:
                break
        return Timing(tokens, ended_s - started_s)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        (result,) = generate(self._engine, [prompt], _greedy(count))
        return list(result.token_ids)

    def _tokens(self, prompts: Prompts, count: int) -> Iterator[tuple[int, float]]:
        """(which prompt, `time.perf_counter()`) of each new token; leaving early aborts the rest.

        Raises MetainferError if a prompt fails.
        """
        ids = {uuid.uuid4().hex: index for index in range(len(prompts))}
        for request_id, index in ids.items():
            prompt = tuple(prompts[index])
            self._engine.submit(Request(request_id, prompt, _greedy(count), time.monotonic()))
        live = set(ids)
        try:
            while live:
                events = self._engine.events()
                now_s = time.perf_counter()
                ended = [event for event in events if isinstance(event, FinishEvent)]
                live.difference_update(event.request_id for event in ended)
                failed = [event for event in ended if event.reason is FinishReason.ERROR]
                if failed:
                    raise MetainferError(f"the engine failed: {failed[0].error}")
                for event in events:
                    if isinstance(event, TokenEvent):
                        yield from ((ids[event.request_id], now_s) for _ in event.token_ids)
        finally:
            self._abort(live)

    def _abort(self, live: set[str]) -> None:
        """End requests, and read their events, so that the next work finds none."""
        for request_id in live:
            self._engine.abort(request_id)
        while live:
            ended = (e for e in self._engine.events() if isinstance(e, FinishEvent))
            live.difference_update(event.request_id for event in ended)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
