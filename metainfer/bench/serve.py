"""Load on an OpenAI-compatible server: closed loop (bounded concurrency) and open loop (arrivals).

Owns when requests are sent. What they hold is in `workload`, how one is timed in `http_stream`,
what is made of the times in `serve_report`.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from metainfer.bench.http_stream import ExchangeError, Outcome, Server, get_json, stream_completion
from metainfer.bench.serve_settings import ENDPOINTS, ServeLoad
from metainfer.bench.workload import (
    Ask,
    Calibration,
    RandomWords,
    Source,
    TextPassages,
    arrival_times_s,
    make_asks,
)
from metainfer.core.errors import UserError

_PROBE_WORDS = (16, 144)
_QUICK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load.

    Attributes:
        outcomes: of the requests that ended, in the order in which they did.
        duration_s: from the first request sent to the last one ended.
        interrupted: requests were left out because the user ended the run.
    """

    outcomes: tuple[Outcome, ...]
    duration_s: float
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs, and what had to be found out for them."""

    model: str
    seed: int
    runs: tuple[Run, ...]

    @property
    def interrupted(self) -> bool:
        return any(run.interrupted for run in self.runs)


def measure(load: ServeLoad, on_progress: Callable[[int, int], None]) -> Measured:
    """Put the load on the server, `load.repeats` times. Ctrl-C ends it early with what is there.

    Args:
        on_progress: called with (requests ended, requests in all).

    Raises UserError if no server answers, or it refuses the very first request.
    """
    return asyncio.run(_measure(load, on_progress))


async def _measure(load: ServeLoad, on_progress: Callable[[int, int], None]) -> Measured:
    server = Server.parse(load.base_url, load.api_key)
    model = load.model or await _first_model(server)
    seed = random.SystemRandom().randrange(2**31) if load.seed is None else load.seed
    sender = _Sender(server, load, model)
    source = _source(load, seed)
    calibration = await _calibrate(sender, source)
    lengths = (load.random_input_len, load.random_output_len)
    total = load.num_prompts * load.repeats
    runs: list[Run] = []
    with _interruption() as interrupted:
        warmups = make_asks(source, calibration, seed, load.num_warmups, lengths, 0.0)
        for ask in warmups:
            await _unless(interrupted, sender.send(ask))
        for repeat in range(load.repeats):
            asks = make_asks(
                source, calibration, seed + repeat, load.num_prompts, lengths,
                load.random_range_ratio,
            )  # fmt: skip
            ended_before = repeat * load.num_prompts

            def advance(ended: int, before: int = ended_before) -> None:
                on_progress(before + ended, total)

            runs.append(await _run(sender, asks, seed + repeat, advance, interrupted))
            if interrupted.is_set():
                break
    return Measured(model, seed, tuple(runs))


async def _run(
    sender: _Sender,
    asks: Sequence[Ask],
    seed: int,
    advance: Callable[[int], None],
    interrupted: asyncio.Event,
) -> Run:
    load = sender.load
    outcomes: list[Outcome] = []
    places = asyncio.Semaphore(load.max_concurrency or len(asks))
    started_s = time.perf_counter()

    async def one(ask: Ask, arrives_s: float) -> None:
        await asyncio.sleep(started_s + arrives_s - time.perf_counter())
        async with places:
            outcomes.append(await sender.send(ask))
        advance(len(outcomes))

    arrivals = arrival_times_s(seed, load.request_rate, load.burstiness)
    tasks = [
        asyncio.ensure_future(one(ask, arrives_s))
        for ask, arrives_s in zip(asks, arrivals, strict=False)
    ]
    await _unless(interrupted, asyncio.gather(*tasks))
    duration_s = time.perf_counter() - started_s
    return Run(tuple(outcomes), duration_s, len(outcomes) < len(asks))


async def _unless(interrupted: asyncio.Event, work: Any) -> None:
    """Await `work`, or cancel it as soon as `interrupted` is set."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(interrupted.wait())
    await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    for unfinished in (task, waiter):
        unfinished.cancel()
    await asyncio.gather(task, waiter, return_exceptions=True)
    # A group of tasks that is cancelled does not count as such: it keeps the error of its parts.
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, asyncio.CancelledError):
        raise error


@contextmanager
def _interruption() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets, once; a second Ctrl-C ends the program as ever."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    # Outside the main thread there are no signals: whoever runs us there ends us otherwise.
    with suppress(ValueError, NotImplementedError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        if not interrupted.is_set():
            loop.remove_signal_handler(signal.SIGINT)


@dataclass(frozen=True, slots=True)
class _Sender:
    """Knows how a request is written for the server."""

    server: Server
    load: ServeLoad
    model: str

    async def send(self, ask: Ask) -> Outcome:
        load = self.load
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.backend == "openai-chat":
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        if load.temperature is not None:
            body["temperature"] = load.temperature
        if load.ignore_eos:
            body["ignore_eos"] = True
        path = ENDPOINTS[load.backend]
        return await stream_completion(self.server, path, body, load.request_timeout_s)


async def _first_model(server: Server) -> str:
    try:
        models = await get_json(server, "/v1/models", _QUICK_TIMEOUT_S)
        return str(models["data"][0]["id"])
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"no server answers at {server.url}",
            hint="start one with `metainfer serve`, or name another with --base-url",
        ) from error
    except ExchangeError as error:
        hint = "give its key with --api-key" if "HTTP 401" in str(error) else None
        raise UserError(f"{server.url}/v1/models: {error}", hint=hint) from error
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{server.url}/v1/models names no model", hint="name one with --model"
        ) from error


def _source(load: ServeLoad, seed: int) -> Source:
    if load.dataset_path is None:
        return RandomWords(seed)
    return TextPassages(load.dataset_path, seed)


async def _calibrate(sender: _Sender, source: Source) -> Calibration:
    """Ask the server how many tokens two prompts of known words have."""
    counts = []
    for words in _PROBE_WORDS:
        outcome = await sender.send(Ask(source.passage(words), 1))
        if outcome.error:
            raise UserError(
                f"{sender.server.url} refused the first request: {outcome.error}",
                hint="check --base-url, --backend and --model",
            )
        counts.append((words, outcome.prompt_tokens))
    return Calibration.through(counts[0], counts[1])
