"""From the engine's one queue to many waiting calls: routing, aborts, an engine that fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest

from metainfer.core.errors import RequestError
from metainfer.core.events import (
    FinishEvent,
    FinishReason,
    GenerationEnd,
    TextDelta,
    TextEvent,
    Usage,
)
from metainfer.llm.client import EngineStats
from metainfer.llm.dispatch import Call, Dispatcher
from metainfer.llm.generation import Generation, TextOptions
from metainfer.llm.request import Request, SamplingParams
from metainfer.text.tokenizer import Tokenizer
from tests.fakes.fake_engine import FakeEngine, ScriptError
from tests.fakes.tiny_tokenizer import tiny_tokenizer

EOS = 1
_numbers = count()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Repeats each prompt backwards."""
    with FakeEngine(lambda request: request.prompt_token_ids[::-1]) as engine:
        yield engine


@pytest.fixture
def dispatcher(engine: FakeEngine) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(engine)
    yield dispatcher
    dispatcher.close()


def generation(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> Generation:
    ids = tuple(tokenizer.encode(text)[::-1])
    request = Request(f"r{next(_numbers)}", ids, SamplingParams(), time.monotonic())
    return Generation(request, tokenizer, (EOS,), TextOptions(stop))


def texts(events: Sequence[tuple[int, TextEvent]], choices: int) -> list[str]:
    found = [""] * choices
    for index, event in events:
        if isinstance(event, TextDelta):
            found[index] += event.text
    return found


class Seen:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.tokens: list[tuple[str, int, float | None]] = []
        self.ends: list[tuple[str, FinishReason]] = []

    def on_tokens(self, generation: Generation, count: int, now_s: float) -> None:
        self.tokens.append((generation.request.request_id, count, generation.last_token_s))

    def on_end(self, generation: Generation, end: GenerationEnd, now_s: float) -> None:
        self.ends.append((generation.request.request_id, end.reason))


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, "it does not come to pass"
        time.sleep(0.002)


def test_a_call_gets_the_events_of_its_generations(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    seen = Seen()
    generations = [generation(tokenizer, text) for text in ("one fish", "two fish", "red")]
    call = Call(dispatcher, generations, seen)
    call.open()
    events = list(call.iterate())
    call.close()
    assert texts(events, 3) == ["one fish", "two fish", "red"]
    assert sum(isinstance(event, GenerationEnd) for _, event in events) == 3
    assert sorted(seen.ends) == sorted(
        (g.request.request_id, FinishReason.STOP) for g in generations
    )
    first = generations[0]
    ids = first.request.prompt_token_ids
    mine = [t for t in seen.tokens if t[0] == first.request.request_id]
    assert sum(n for _, n, _ in mine) == len(ids)
    assert mine[0][2] is None and None not in [t[2] for t in mine[1:]]
    assert engine.aborted == [] and len(dispatcher) == 0


def test_calls_of_many_threads_do_not_mix(dispatcher: Dispatcher, tokenizer: Tokenizer) -> None:
    said = [f"number {i} of many, {'x' * i}" for i in range(32)]
    heard: dict[int, list[str]] = {}

    def talk(i: int) -> None:
        call = Call(dispatcher, [generation(tokenizer, said[i])])
        call.open()
        heard[i] = texts(list(call.iterate()), 1)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(len(said))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {i: [text] for i, text in enumerate(said)}


def test_a_stop_string_aborts_the_request(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    stopping = generation(tokenizer, "and so on and on and on and on", stop=(" on and",))
    call = Call(dispatcher, [stopping])
    call.open()
    events = list(call.iterate())
    assert texts(events, 1) == ["and so"]
    assert engine.aborted == [stopping.request.request_id]
    assert stopping.end is not None and stopping.end.reason is FinishReason.STOP


def test_closing_aborts_what_has_not_ended(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    engine.tick_s = 0.01
    seen = Seen()
    short, long = generation(tokenizer, "a"), generation(tokenizer, "b" * 500)
    call = Call(dispatcher, [short, long], seen)
    call.open()
    for index, event in call.iterate():
        if index == 0 and isinstance(event, GenerationEnd):
            break
    call.close()
    call.close()
    assert engine.aborted == [long.request.request_id]
    assert seen.ends == [
        (short.request.request_id, FinishReason.STOP),
        (long.request.request_id, FinishReason.ABORT),
    ]
    assert list(call.iterate()) == []
    wait_for(lambda: engine.num_live == 0 and len(dispatcher) == 0)


def test_all_requests_of_a_call_are_queued_or_none(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    engine.flowing.clear()
    engine.max_running, engine.max_queued = 1, 1
    call = Call(dispatcher, [generation(tokenizer, "x") for _ in range(3)])
    with pytest.raises(RequestError) as caught:
        call.open()
    assert caught.value.status == 429
    assert engine.num_live == 0 and len(dispatcher) == 0
    assert list(call.iterate()) == []


def test_a_request_that_fails_costs_no_other(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    def script(request: Request) -> Sequence[int]:
        if len(request.prompt_token_ids) == 1:
            raise ScriptError("It broke.")
        return request.prompt_token_ids[::-1]

    engine.script = script
    generations = [generation(tokenizer, "x"), generation(tokenizer, "fine")]
    call = Call(dispatcher, generations)
    call.open()
    assert texts(list(call.iterate()), 2) == ["", "fine"]
    ends = [g.end for g in generations]
    assert [end and end.reason for end in ends] == [FinishReason.ERROR, FinishReason.STOP]
    assert ends[0] is not None and ends[0].error == "It broke."


def test_an_engine_that_dies_ends_every_call(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    engine.flowing.clear()
    waiting = generation(tokenizer, "x")
    call = Call(dispatcher, [waiting])
    call.open()
    engine.die()
    events = list(call.iterate())
    assert isinstance(events[-1][1], GenerationEnd)
    assert events[-1][1].reason is FinishReason.ERROR
    assert events[-1][1].error == "the engine has failed: the engine has stopped"
    with pytest.raises(RequestError) as caught:
        Call(dispatcher, [generation(tokenizer, "y")]).open()
    assert caught.value.status == 503


def test_what_an_engine_says_as_it_dies_is_passed_on(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    """Its last events come between the dispatcher's look for some and its look whether it lives."""
    last_words = threading.Event()
    stats = engine.stats

    def stats_after_last_words() -> EngineStats:
        if not last_words.is_set():
            last_words.set()
            (request,) = engine.submitted
            reason = FinishReason.ERROR
            engine.say(FinishEvent(request.request_id, reason, Usage(1, 0), error="It broke."))
            engine.die()
        return stats()

    engine.flowing.clear()
    call = Call(dispatcher, [generation(tokenizer, "x")])
    call.open()
    engine.stats = stats_after_last_words  # type: ignore[method-assign]
    ((_, end),) = call.iterate()
    assert isinstance(end, GenerationEnd) and end.error == "It broke."


def test_in_asyncio_silence_is_told_and_events_arrive_in_the_loop(
    engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    async def talk() -> list[tuple[int, TextEvent] | None]:
        dispatcher = Dispatcher(engine, asyncio.get_running_loop().call_soon_threadsafe)
        call = Call(dispatcher, [generation(tokenizer, "hello")])
        engine.flowing.clear()
        call.open_async()
        items: list[tuple[int, TextEvent] | None] = []
        async for item in call.stream(idle_s=0.02):
            items.append(item)
            if items == [None, None]:
                engine.flowing.set()
        await asyncio.to_thread(dispatcher.close)
        return items

    items = asyncio.run(talk())
    assert items[:2] == [None, None]
    assert texts([item for item in items if item is not None], 1) == ["hello"]


def test_fail_all_tells_and_aborts_everything(
    engine: FakeEngine, dispatcher: Dispatcher, tokenizer: Tokenizer
) -> None:
    engine.flowing.clear()
    waiting = generation(tokenizer, "x")
    call = Call(dispatcher, [waiting])
    call.open()
    dispatcher.fail_all("the server is shutting down")
    ((_, end),) = call.iterate()
    assert isinstance(end, GenerationEnd) and end.error == "the server is shutting down"
    assert engine.aborted == [waiting.request.request_id]
    assert len(dispatcher) == 0
