"""This engine as a contender: the whole way of a request, from submission to its events."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from metainfer.arch.record import Arch
from metainfer.bench.contender import Prompts, Timing
from metainfer.bench.positions import check_positions
from metainfer.bench.positions_watch import PositionsWatch
from metainfer.bench.quality import checked
from metainfer.bench.traffic import Arrival, Served
from metainfer.bench.watched import Watched
from metainfer.core.errors import MetainferError, UserError
from metainfer.core.events import EngineEvent, FinishEvent, FinishReason, TokenEvent, Usage
from metainfer.hardware.device_names import gpu_number
from metainfer.hardware.machine import Gpu, Machine, Unknown
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.open import PROJECTS
from metainfer.kernels.platform import launcher
from metainfer.llm.engine import Engine, LoadedModel, load_model
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.threads import in_a_thread
from metainfer.ops.kernel_order import OPEN
from metainfer.plan.build import build_plan, choose_target
from metainfer.plan.plan_file import settle
from metainfer.plan.settings import EngineSettings

_MOST_TOPS = 20  # alternatives that can be asked for


class EngineContender:
    """The engine as `serve` starts it with these settings.

    Args:
        check: "tokens", "count" and "seed": positions that are held against the references before
            it serves.
    """

    def __init__(
        self, model: Path, settings: EngineSettings, check: Mapping[str, int] | None = None
    ) -> None:
        began_s = time.perf_counter()
        self._checked: dict[str, Any] | None = None
        if check is None:
            self._engine = Engine.load(model, settings)
        else:
            loaded, self._checked = load_checked(model, settings, **check)
            self._engine = Engine.start(loaded)
        self._settings = settings
        self._load_s = time.perf_counter() - began_s
        self._prompt_tokens = self._cached_tokens = 0

    @property
    def dtype(self) -> str:
        return self._engine.plan.compute_dtype.value

    @property
    def gpus(self) -> tuple[int, ...]:
        plan = self._engine.plan
        numbers = [gpu_number(plan.of_rank(rank).device.value) for rank in range(plan.ranks)]
        return tuple(number for number in numbers if number is not None)

    def close(self) -> None:
        self._engine.close()

    def prefill(self, prompt: Sequence[int]) -> Timing:
        started_s = time.perf_counter()
        arrivals = [now_s for _, now_s in self._tokens([prompt], 1)]
        return Timing(len(prompt), arrivals[0] - started_s)

    def decode(self, prompts: Prompts, count: int, on_start: Callable[[], None]) -> Timing:
        """Timed are the first so many tokens that come once all sequences have one: whoever was
        first out of prefill runs on until then, so that the whole batch runs all the time."""
        room = self._engine.plan.max_model_len.value - max(map(len, prompts))
        return timed_batch(self._tokens(prompts, room), len(prompts), count, room, on_start)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        (result,) = self._generate([prompt], _greedy(count))
        return list(result.token_ids)

    def score(self, windows: Prompts) -> list[list[tuple[float, list[tuple[int, float]]]]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=_MOST_TOPS)
        scores = []
        for result in self._generate(windows, sampling):
            told = [entry for entry in result.prompt_logprobs if entry is not None]
            scores.append([(entry.logprob, list(entry.top)) for entry in told])
        return scores

    def traffic(self, arrivals: Sequence[Arrival]) -> list[Served]:
        waiting = list(reversed(arrivals))
        live: dict[str, _Watched] = {}
        served: list[Served] = []
        began_s = time.perf_counter()
        while waiting or live:
            while waiting and waiting[-1].at_s <= time.perf_counter() - began_s:
                arrival = waiting.pop()
                request = Request(
                    uuid.uuid4().hex, arrival.prompt, _greedy(arrival.count), time.monotonic()
                )
                # From when it should have come: being late to submit it is waiting too.
                live[request.request_id] = _Watched(began_s + arrival.at_s)
                self._engine.submit(request)
            pause_s = None
            if waiting:
                pause_s = max(0.0, began_s + waiting[-1].at_s - time.perf_counter())
            for event in self._events(pause_s):
                done = live[event.request_id].take(event, time.perf_counter(), began_s)
                if done is not None:
                    del live[event.request_id]
                    served.append(done)
        return served

    def receipt(self) -> dict[str, Any]:
        engine = self._engine
        chosen: dict[str, Counter[str]] = {}
        for kernel in engine.kernels:
            chosen.setdefault(kernel.op, Counter())[kernel.backend] += 1
        return {
            "settings": asdict(self._settings),
            "plan": json.loads(engine.plan.to_json())["values"],
            "kernels": {op: dict(backends) for op, backends in chosen.items()},
            "open": {op: PROJECTS[op] for op, backends in chosen.items() if OPEN in backends},
            "load_s": self._load_s,
            "positions": self._checked,
            "longest_context": longest_context(engine.machine, engine.arch, self._as_planned()),
        }

    def _as_planned(self) -> EngineSettings:
        """The settings, with the formats of caches that the plan chose."""
        plan = self._engine.plan
        return replace(
            self._settings,
            kv_cache_dtype=plan.cache_dtype.value,
            index_cache_dtype=plan.index_cache_dtype.value,
        )

    def counted(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "kernels_compiled": self._engine.stats().kernels_compiled,
        }

    def _generate(self, prompts: Prompts, sampling: SamplingParams) -> list[Result]:
        results = checked(generate(self._engine, prompts, sampling))
        for result in results:
            self._count(result.usage)
        return results

    def _count(self, usage: Usage) -> None:
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens

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
                events = self._events()
                now_s = time.perf_counter()
                live -= {e.request_id for e in events if isinstance(e, FinishEvent)}
                for event in events:
                    if isinstance(event, TokenEvent):
                        yield from ((ids[event.request_id], now_s) for _ in event.token_ids)
        finally:
            self._abort(live)

    def _events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        """The next events, counted. Raises MetainferError if a request failed."""
        events = self._engine.events(timeout_s)
        for event in events:
            if isinstance(event, FinishEvent):
                self._count(event.usage)
                if event.reason is FinishReason.ERROR:
                    raise MetainferError(f"the engine failed: {event.error}")
        if not events and not self._engine.stats().alive:
            raise MetainferError("the engine has stopped")
        return events

    def _abort(self, live: set[str]) -> None:
        """End requests, and read their events, so that the next work finds none."""
        for request_id in live:
            self._engine.abort(request_id)
        while live and self._engine.stats().alive:
            ended = [e for e in self._engine.events(1.0) if isinstance(e, FinishEvent)]
            live -= {event.request_id for event in ended}
            for event in ended:
                self._count(event.usage)


def timed_batch(
    arrivals: Iterable[tuple[int, float]],
    sequences: int,
    count: int,
    room: int,
    on_start: Callable[[], None],
) -> Timing:
    """`count` - 1 tokens of each of the sequences, from when all have one.

    Args:
        arrivals: (which sequence, seconds) of each new token.
        room: tokens that a sequence can have.
        on_start: told when all have one.

    Raises MetainferError if one ended before, and left a smaller batch.
    """
    wanted = sequences * (count - 1)
    without_token = set(range(sequences))
    left = dict.fromkeys(range(sequences), room)
    tokens, started_s, ended_s = 0, 0.0, 0.0
    for index, now_s in arrivals:
        left[index] -= 1
        if without_token:
            without_token.discard(index)
            started_s = now_s
            if not without_token:
                on_start()
        else:
            tokens, ended_s = tokens + 1, now_s
        if not without_token and tokens == wanted:
            return Timing(tokens, ended_s - started_s)
        if not left[index]:
            break
    raise MetainferError(
        f"a sequence had its {room} tokens before all {sequences} had decoded {count} together:"
        " give a larger --max-model-len"
    )


class _Watched:
    """When the tokens of one request came."""

    def __init__(self, due_s: float) -> None:
        self._due_s = due_s
        self._first_s = self._last_s = 0.0
        self._tokens = 0

    def take(self, event: EngineEvent, now_s: float, began_s: float) -> Served | None:
        """What it got, once it has ended."""
        if isinstance(event, TokenEvent):
            self._first_s = self._first_s or now_s
            self._last_s = now_s
            self._tokens += len(event.token_ids)
        if not isinstance(event, FinishEvent):
            return None
        gaps = max(self._tokens - 1, 1)
        return Served(
            ttft_s=self._first_s - self._due_s,
            tpot_s=(self._last_s - self._first_s) / gaps if self._tokens > 1 else None,
            ended_s=now_s - began_s,
            prompt_tokens=event.usage.prompt_tokens,
            output_tokens=self._tokens,
            cached_tokens=event.usage.cached_tokens,
        )


def load_checked(
    model: Path, settings: EngineSettings, tokens: int, count: int, seed: int
) -> tuple[LoadedModel, dict[str, Any]]:
    """A model in memory, and what is found at positions of a prompt (`bench.positions`)."""
    watch = PositionsWatch()
    loaded = load_model(model, settings, watched=lambda found: Watched(found, watch))
    found = in_a_thread(loaded.plan, lambda: check_positions(loaded, watch, tokens, count, seed))
    if loaded.plan.device.value != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return loaded, found.to_json()


def longest_context(machine: Machine, arch: Arch, settings: EngineSettings) -> int | None:
    """Tokens of the longest single sequence for which the plan finds room, with the GPU's memory to
    itself; None where it finds none."""
    settings = settle(settings, arch, machine).settings
    alone = replace(settings, max_model_len=None, num_blocks_override=None, max_num_seqs=1)
    gpus: tuple[Gpu, ...] | Unknown = machine.gpus
    if not isinstance(gpus, Unknown):
        gpus = tuple(replace(gpu, free_bytes=gpu.memory_bytes) for gpu in gpus)
    emptied = replace(machine, gpus=gpus)
    try:
        capabilities = builtin_registry(launcher(alone.code_for)).capabilities
        able = choose_target(emptied, arch, alone, capabilities)
        return build_plan(emptied, arch, alone, able).max_model_len.value
    except UserError:
        return None


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def settings_of(values: Mapping[str, Any]) -> EngineSettings:
    """EngineSettings that went through JSON."""
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return EngineSettings(**given)
