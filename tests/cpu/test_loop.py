"""Loop: whatever happens in the engine thread, every request gets its last event, and only one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from metainfer.core.errors import RequestError
from metainfer.core.events import EngineEvent, FinishEvent, FinishReason, TokenEvent
from metainfer.llm.admission import Limits
from metainfer.llm.loop import FAILURES_IN_A_ROW, Loop
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.runner import Runner
from metainfer.llm.scheduler import Scheduler
from tests.fakes.interrupts import interrupted_at
from tests.fakes.samplers import cpu_sampler
from tests.fakes.toy_model import BREAK, POISON, ToyCache, ToyModel

VOCAB, EOS = 60, 1
LIMITS = Limits(
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    max_model_len=400,
    max_num_seqs=3,
    max_num_batched_tokens=32,
    max_queued_requests=5,
    num_blocks=6,
)


def make_runner(limits: Limits = LIMITS) -> Runner:
    return Runner(
        ToyModel(VOCAB),
        ToyCache(limits.max_num_seqs, limits.num_blocks),
        sampler=cpu_sampler(VOCAB, limits.max_num_seqs),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        num_slots=limits.max_num_seqs,
        max_blocks=4,
        device=torch.device("cpu"),
    )


@dataclass
class Gate:
    """Lets steps of a runner through one by one, or all."""

    runner: Runner
    open: threading.Event = field(default_factory=threading.Event)
    fatal: bool = False

    def execute(self, step):
        return self.launch(step).wait()

    def launch(self, step):
        assert self.open.wait(20)
        return self.runner.launch(step)

    def is_fatal(self, error: Exception) -> bool:
        return self.fatal


OPTIONS = {"check_every_step": True, "ahead": False}


@pytest.fixture(autouse=True, params=[False, True], ids=["step by step", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(OPTIONS, "ahead", request.param)
    return request.param


@contextmanager
def running(executor=None, limits: Limits = LIMITS, **options) -> Iterator[Loop]:
    options = {**OPTIONS, **options}
    loop = Loop(Scheduler(limits), executor or make_runner(limits), **options)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.close()
        thread.join(20)
        assert not thread.is_alive()


def request(name: str, prompt=(10, 11, 12), max_tokens: int = 5, **params) -> Request:
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), 0.0)


def collect(loop: Loop, number: int) -> tuple[dict[str, list[int]], dict[str, FinishEvent]]:
    """(tokens, last events) of requests, until `number` have ended."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishEvent] = {}
    while len(ends) < number:
        events = loop.events(20)
        assert events, "the loop has nothing more to say"
        take(events, tokens, ends)
    return tokens, ends


def take(events, tokens, ends) -> None:
    for event in events:
        assert event.request_id not in ends, "an event after the last one"
        if isinstance(event, TokenEvent):
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
        elif isinstance(event, FinishEvent):
            ends[event.request_id] = event


def expected(req: Request) -> list[int]:
    model, tokens = ToyModel(VOCAB), list(req.prompt_token_ids)
    while len(tokens) < len(req.prompt_token_ids) + req.sampling.max_tokens:
        tokens.append(int(model.after(tokens).argmax()))
    return tokens[len(req.prompt_token_ids) :]


def test_requests_from_many_threads_all_get_their_tokens():
    requests = [request(f"r{n}", (10 + n, 30, 31), 2 + n % 3) for n in range(8)]
    with running() as loop:
        threads = [threading.Thread(target=loop.submit, args=(r,)) for r in requests]
        for thread in threads:
            thread.start()
        tokens, ends = collect(loop, len(requests))
        stats = loop.stats()
    for each in requests:
        assert tokens[each.request_id] == expected(each)
        assert ends[each.request_id].reason is FinishReason.LENGTH
    assert (stats.num_running, stats.num_waiting, stats.num_finished) == (0, 0, 8)
    assert stats.num_free_blocks == LIMITS.num_blocks and stats.num_free_slots == 3
    assert stats.generation_tokens == sum(map(len, tokens.values()))


def test_what_can_never_be_served_is_refused_at_once():
    with running() as loop:
        for bad, code in [
            (request("long", [10] * 401), "context_length_exceeded"),
            (request("empty", []), "empty_prompt"),
            (request("strange", [VOCAB]), "invalid_token_id"),
        ]:
            with pytest.raises(RequestError) as caught:
                loop.submit(bad)
            assert caught.value.code == code


def test_ids_are_unique_and_the_queue_is_bounded():
    gate = Gate(make_runner())
    with running(gate) as loop:
        for n in range(LIMITS.max_num_seqs + LIMITS.max_queued_requests):
            loop.submit(request(f"r{n}"))
        with pytest.raises(RequestError) as caught:
            loop.submit(request("one too many"))
        assert caught.value.status == 429
        loop.abort("r7")
        gate.open.set()
        _, ends = collect(loop, 8)
        assert ends["r7"].reason is FinishReason.ABORT
        loop.submit(request("r0"))  # the id is free again
        collect(loop, 1)
        loop.submit(request("twice", max_tokens=300))
        with pytest.raises(RequestError) as caught:
            loop.submit(request("twice"))
        assert caught.value.code == "duplicate_request_id"


def test_an_abort_ends_one_request_and_frees_what_it_held():
    with running() as loop:
        loop.submit(request("goes", (20, 21), max_tokens=300))
        loop.submit(request("stays", (10, 11), max_tokens=40))
        first = loop.events(20)
        loop.abort("goes")
        loop.abort("never seen")
        tokens: dict[str, list[int]] = {}
        ends: dict[str, FinishEvent] = {}
        take(first, tokens, ends)
        while len(ends) < 2:
            take(loop.events(20), tokens, ends)
        assert ends["goes"].reason is FinishReason.ABORT
        assert ends["stays"].reason is FinishReason.LENGTH
        assert tokens["stays"] == expected(request("stays", (10, 11), max_tokens=40))
        assert loop.stats().num_free_blocks == LIMITS.num_blocks
        loop.abort("goes")  # again, and too late
        assert loop.events(0.01) == ()


def test_a_step_that_fails_costs_its_requests_and_no_others():
    with running() as loop:
        loop.submit(request("breaks", (10, BREAK)))
        _, ends = collect(loop, 1)
        assert ends["breaks"].reason is FinishReason.ERROR
        assert "a token broke the model" in ends["breaks"].error
        loop.submit(request("fine"))
        tokens, _ = collect(loop, 1)
        assert tokens["fine"] == expected(request("fine"))
        assert loop.stats().alive and loop.stats().num_errors == 1


def test_nan_logits_cost_their_own_request():
    with running() as loop:
        loop.submit(request("bad", (10, POISON)))
        loop.submit(request("fine"))
        tokens, ends = collect(loop, 2)
        assert ends["bad"].reason is FinishReason.ERROR and "not finite" in ends["bad"].error
        assert tokens["fine"] == expected(request("fine"))


def assert_dead(loop: Loop, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        loop.submit(request("late"))
    assert caught.value.status == 503 and word in caught.value.message
    assert not loop.stats().alive
    while loop.events(0.01):
        pass
    assert loop.events(None) == ()  # at once, though it may wait for ever


def test_a_lost_device_ends_every_request_and_wakes_the_consumer():
    gate = Gate(make_runner(), fatal=True)
    with running(gate) as loop:
        loop.submit(request("breaks", (BREAK,)))
        for n in range(5):
            loop.submit(request(f"waits{n}", [10] * 30))
        gate.open.set()
        _, ends = collect(loop, 6)
        assert {end.reason for end in ends.values()} == {FinishReason.ERROR}
        assert_dead(loop, "the device failed")


def test_steps_that_fail_again_and_again_end_the_engine():
    with running() as loop:
        for n in range(FAILURES_IN_A_ROW):
            loop.submit(request(f"r{n}", (BREAK,)))
            collect(loop, 1)
        assert_dead(loop, f"{FAILURES_IN_A_ROW} steps failed in a row")


def test_wrong_books_end_the_engine_and_every_request(monkeypatch):
    gate = Gate(make_runner())
    with running(gate) as loop:
        for n in range(4):
            loop.submit(request(f"r{n}"))
        loop._scheduler.pool.blocks.allocate(1)  # a block that nobody owns
        gate.open.set()
        _, ends = collect(loop, 4)
        assert {end.reason for end in ends.values()} == {FinishReason.ERROR}
        assert_dead(loop, "InvariantError")


def test_without_tests_a_leak_is_found_when_nothing_runs_and_without_a_slow_look(monkeypatch):
    """Looking at every block holds up the next request: half a second with 524,288 of them."""
    monkeypatch.setattr(Scheduler, "check", None)
    with running(check_every_step=False) as loop:
        for n in range(2):
            loop.submit(request(f"r{n}", max_tokens=3))
            _, ends = collect(loop, 1)
            assert ends[f"r{n}"].reason is FinishReason.LENGTH
        loop._scheduler.pool.blocks.allocate(1)  # a block that nobody owns
        loop.submit(request("last", max_tokens=3))
        collect(loop, 1)
        wait_until(lambda: not loop.stats().alive)
        assert_dead(loop, "InvariantError: nobody is left, and 1 blocks are held")


def test_closing_aborts_what_is_not_done():
    with running() as loop:
        for n in range(5):
            loop.submit(request(f"r{n}", max_tokens=390))
        loop.close()
        loop.close()
        _, ends = collect(loop, 5)
        assert {end.reason for end in ends.values()} == {FinishReason.ABORT}
        assert loop.events(None) == ()
        with pytest.raises(RequestError, match="has stopped"):
            loop.submit(request("late"))


def test_the_engine_waits_for_a_consumer_that_does_not_keep_up(ahead):
    runner = make_runner()
    with running(runner, max_outbox_events=4) as loop:
        loop.submit(request("r", (10,), max_tokens=50))
        wait_until(lambda: loop.stats().num_steps >= 4 + ahead)
        loop.abort("unknown")  # wakes the thread, which must not make a step
        time.sleep(0.05)
        assert loop.stats().num_steps == 4 + ahead, "ahead, the results of one wait to be read"
        tokens, _ = collect(loop, 1)
        assert tokens["r"] == expected(request("r", (10,), max_tokens=50))


def test_ctrl_c_at_any_moment_leaves_no_lock_taken():
    """The main thread submits, reads and aborts; afterwards the loop serves as before."""
    again = request("again", max_tokens=2)
    for number in count(1, 13):
        with running() as loop:

            def use(loop: Loop = loop) -> None:
                loop.submit(request("one", max_tokens=3))
                tokens, ends = {}, {}
                take(loop.events(20), tokens, ends)
                loop.abort("one")
                while "one" not in ends:
                    take(loop.events(20), tokens, ends)

            try:
                interrupted = interrupted_at(number, use)
            except KeyboardInterrupt:
                interrupted = True
            loop.abort("one")
            loop.submit(again)
            tokens, ends = {}, {}
            while "again" not in ends:
                take(loop.events(20), tokens, ends)
            assert tokens["again"] == expected(again)
        if not interrupted:
            break
    assert number > 50


def wait_until(holds, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_events_time_out_and_keep_their_order():
    with running() as loop:
        assert loop.events(0.01) == ()
        loop.submit(request("r", max_tokens=3))
        seen: list[EngineEvent] = []
        while not any(isinstance(event, FinishEvent) for event in seen):
            seen += loop.events(20)
        assert [type(event) for event in seen] == [TokenEvent] * 3 + [FinishEvent]
