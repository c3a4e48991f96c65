"""The scheduler: nothing leaks and nothing is lost, whatever happens in between, with drafts and
with steps made ahead."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.events import FinishReason
from metainfer.llm.policy import Policies
from metainfer.llm.request import Request
from metainfer.llm.scheduler import Scheduler
from tests.fakes.scheduling import (
    LIMITS,
    VOCAB,
    Ahead,
    Collected,
    Oracle,
    assert_as_expected,
    drive,
    expected,
    request,
)
from tests.fakes.shadow import ShadowRunner


def test_drafted_rows_change_nothing_but_the_number_of_steps():
    limits = replace(LIMITS, draft_rows=3)
    requests = [request(f"r{i}", 30 + 60 * i, 150, ignore_eos=i % 2 == 0) for i in range(6)]
    plain, drafting = Scheduler(LIMITS), Scheduler(limits, Policies(drafter=Oracle()))
    assert_as_expected(drive(plain, requests), requests)
    assert_as_expected(drive(drafting, requests), requests)
    assert drafting.counters.steps < 0.8 * plain.counters.steps


prompts = st.one_of(st.integers(1, 5), st.integers(100, 300), st.integers(1, 500))
additions = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(0, 260), st.integers(0, 1)),
    st.tuples(st.just("add"), prompts, st.none(), st.just(0)),
)
operations = st.one_of(
    additions,
    st.tuples(st.just("abort"), st.integers(0, 12)),
    st.tuples(st.just("abort in flight"), st.integers(0, 12)),
    st.tuples(st.just("preempt"), st.integers(0, 4)),
    st.tuples(st.just("step"), st.integers(1, 40)),
)


@settings(deadline=None, max_examples=30)
@given(
    crowd=st.lists(additions, min_size=3, max_size=8),
    history=st.lists(operations, min_size=4, max_size=30),
    max_num_seqs=st.integers(1, 5),
    budget=st.sampled_from([2, 3, 17, 64, 300]),
    num_blocks=st.integers(5, 9),
    draft_rows=st.sampled_from([0, 0, 2]),
    depth=st.integers(0, 1),
    stages=st.integers(1, 3),
)
def test_any_history(crowd, history, max_num_seqs, budget, num_blocks, draft_rows, depth, stages):
    """Adds, aborts and steps in any order: budgets hold (the shadow asserts it), the cache never
    holds a stranger's token, every request ends as if it had been alone, and all is freed."""
    limits = replace(
        LIMITS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        draft_rows=draft_rows,
        stages=stages,
    )
    scheduler = Scheduler(limits, Policies(drafter=Oracle() if draft_rows else None))
    runner = ShadowRunner(VOCAB, budget, draft_rows)
    seen = Collected()
    requests: list[Request] = []
    aborted: set[str] = set()

    def abort(number: int) -> None:
        if number < len(requests):
            name = requests[number].request_id
            events = scheduler.abort(name)
            aborted.update(e.request_id for e in events)
            seen.take(events)

    ahead = Ahead(scheduler, runner, depth + stages - 1)

    def one_step(between=lambda: None) -> None:
        seen.take(ahead.advance(between) or [])

    for operation in crowd + history:
        match operation:
            case ("add", prompt, max_tokens, priority):
                req = request(
                    f"r{len(requests)}",
                    prompt,
                    max_tokens,
                    priority=priority,
                    ignore_eos=prompt % 4 != 0,
                    prompt_logprobs=1 if prompt % 5 == 0 else None,
                )
                scheduler.add(req)
                requests.append(req)
            case ("abort", number):
                abort(number)
            case ("abort in flight", number):
                one_step(lambda: abort(number))
            case ("preempt", number) if number < scheduler.num_running:
                scheduler._preempt(scheduler._running[number])
            case ("step", count):
                for _ in range(count):
                    one_step()
        scheduler.check()
    for _ in range(60_000):
        events = ahead.advance()
        if events is None:
            break
        seen.take(events)
    assert not scheduler.has_work
    scheduler.pool.check((), ())
    whole = [r for r in requests if r.request_id not in aborted]
    assert_as_expected(seen, whole, limits)
    for req in whole:
        assert (req.request_id in seen.prompts) == (req.sampling.prompt_logprobs is not None)
    assert set(seen.finished) == {r.request_id for r in requests}
    assert scheduler.counters.aborted == len(aborted)


def test_the_same_history_gives_the_same_steps():
    def history() -> list:
        scheduler = Scheduler(replace(LIMITS, num_blocks=8))
        runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
        for i in range(6):
            scheduler.add(request(f"r{i}", 50 * i + 3, 200))
        steps = []
        while (step := scheduler.step()) is not None:
            steps.append(step)
            scheduler.update(step, runner.execute(step))
        return steps

    assert history() == history()


# ---- steps that are made before the results of the one before are read ----


def test_steps_made_ahead_give_the_same_tokens_and_compute_a_row_too_much_at_a_stop():
    requests = [request(f"r{i}", 3 + 40 * i, 30, ignore_eos=i % 2 == 0) for i in range(8)]
    rows = {}
    for depth in (0, 1):
        runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
        seen = drive(Scheduler(LIMITS), requests, runner=runner, depth=depth)
        assert_as_expected(seen, requests)
        rows[depth] = runner.rows_computed
        assert (runner.num_unread > 50) == (depth > 0)
    stopped = sum(expected(r)[1] is FinishReason.STOP for r in requests)
    assert stopped > 0, "the case needs stops"
    assert rows[1] == rows[0] + stopped, "what ends by its length is known to end"


def test_what_lost_its_cache_with_a_token_in_flight_waits_for_it_and_keeps_it():
    scheduler = Scheduler(LIMITS)
    runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
    ahead, seen = Ahead(scheduler, runner, 1), Collected()
    req = request("r", 20, 12, ignore_eos=True)
    scheduler.add(req)
    for _ in range(4):
        seen.take(ahead.advance())
    (sequence,) = scheduler._running
    known = len(sequence.tokens)
    assert sequence.unread == 1
    scheduler._preempt(sequence)
    assert scheduler.step() is None, "its next token is not known yet"
    seen.take(ahead.advance())
    assert len(sequence.tokens) == known + 1
    while (events := ahead.advance()) is not None:
        seen.take(events)
    assert_as_expected(seen, [req])
    assert runner.rows_computed == 20 + 11 + 20 + 3


def test_drafting_waits_for_results():
    limits = replace(LIMITS, draft_rows=2)
    req = request("r", 20, 12, ignore_eos=True)
    scheduler = Scheduler(limits, Policies(drafter=Oracle()))
    runner = ShadowRunner(VOCAB, limits.max_num_batched_tokens, limits.draft_rows)
    assert_as_expected(drive(scheduler, [req], runner=runner, depth=1), [req], limits)
    assert runner.num_unread == 0


def test_a_step_that_fails_ends_its_requests_though_they_are_in_another_one():
    scheduler = Scheduler(LIMITS)
    runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
    scheduler.add(request("r", 20, 12))
    first = scheduler.step()
    output = runner.execute(first)
    second = scheduler.step()
    (end,) = scheduler.fail(first, "it broke")
    assert (end.reason, end.error) == (FinishReason.ERROR, "it broke")
    scheduler.check_idle()
    scheduler.add(request("r", 30, 3, ignore_eos=True))  # another one of that name
    assert scheduler.update(second, replace(output, step_id=second.step_id)) == []
    again = request("r", 30, 3, ignore_eos=True)
    assert_as_expected(drive(scheduler, []), [again])
