"""The scheduler: nobody starves, nothing leaks, nothing is lost, whatever happens in between."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RequestError
from metainfer.core.events import FinishEvent, FinishReason, PromptEvent, TokenEvent, Usage
from metainfer.llm.admission import Limits
from metainfer.llm.policy import Policies, SharedBudget
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.sequence import Sequence
from metainfer.llm.step import SequenceOutput, Step, StepKind, StepOutput
from tests.fakes.shadow import ShadowRunner, next_token

VOCAB, EOS = 50, 7
LIMITS = Limits(
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    max_model_len=640,
    max_num_seqs=4,
    max_num_batched_tokens=96,
    max_queued_requests=16,
    num_blocks=20,
)


def request(
    name: str, prompt: int | tuple[int, ...], max_tokens: int | None = 8, **more
) -> Request:
    priority = more.pop("priority", 0)
    if isinstance(prompt, int):
        prompt = tuple(
            (hash((len(name), name.encode()[-1], i)) % (VOCAB - 10)) + 10 for i in range(prompt)
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)
    return Request(name, prompt, sampling, arrival_s=0.0, priority=priority)


def expected(req: Request, limits: Limits = LIMITS) -> tuple[list[int], FinishReason, int | None]:
    """What the shadow model says when it is asked token by token."""
    tokens, out = req.prompt_token_ids, []
    most = limits.max_model_len - len(tokens)
    if req.sampling.max_tokens is not None:
        most = min(most, req.sampling.max_tokens)
    stops = set(req.sampling.stop_token_ids) | (set() if req.sampling.ignore_eos else {EOS})
    while len(out) < most:
        token = next_token(tokens, VOCAB)
        if token in stops:
            return out, FinishReason.STOP, token
        tokens += (token,)
        out.append(token)
    return out, FinishReason.LENGTH, None


@dataclass
class Collected:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishEvent] = field(default_factory=dict)
    prompts: dict[str, PromptEvent] = field(default_factory=dict)

    def take(self, events) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the last one"
            match event:
                case TokenEvent(request_id, token_ids):
                    assert token_ids
                    self.tokens.setdefault(request_id, []).extend(token_ids)
                case PromptEvent(request_id):
                    assert request_id not in self.prompts and request_id not in self.tokens
                    self.prompts[request_id] = event
                case FinishEvent(request_id):
                    self.finished[request_id] = event


class Ahead:
    """Makes steps of a scheduler, `depth` of them before the results of the first are read."""

    def __init__(self, scheduler: Scheduler, runner: ShadowRunner, depth: int) -> None:
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self.flights: list[tuple[Step, StepOutput]] = []

    def advance(self, between=lambda: None) -> list | None:
        """Events of a step that is done, None if there is none and nothing to do; `between` is
        called while steps are in flight."""
        step = self.scheduler.step()
        self.scheduler.check()
        if step is not None:
            self.flights.append((step, self.runner.execute(step)))
        between()
        if step is not None and len(self.flights) <= self.depth:
            return []
        if not self.flights:
            return None
        events = self.scheduler.update(*self.flights.pop(0))
        self.scheduler.check()
        return events


def drive(
    scheduler: Scheduler, requests, steps: int = 10_000, runner=None, depth: int = 0
) -> Collected:
    limits = scheduler.limits
    runner = runner or ShadowRunner(VOCAB, limits.max_num_batched_tokens, limits.draft_rows)
    seen = Collected()
    for each in requests:
        scheduler.add(each)
    ahead = Ahead(scheduler, runner, depth)
    while (events := ahead.advance()) is not None:
        seen.take(events)
        steps -= 1
        assert steps > 0, "the scheduler goes on for ever"
    assert not scheduler.has_work
    scheduler.pool.check((), ())
    return seen


def assert_as_expected(seen: Collected, requests, limits: Limits = LIMITS) -> None:
    for req in requests:
        tokens, reason, stop = expected(req, limits)
        finish = seen.finished[req.request_id]
        assert seen.tokens.get(req.request_id, []) == tokens
        assert (finish.reason, finish.stop_token_id) == (reason, stop)
        generated = len(tokens) + (stop is not None)
        assert finish.usage == Usage(len(req.prompt_token_ids), generated)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    scheduler = Scheduler(LIMITS)
    runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
    scheduler.add(request("talks", 5, 60, ignore_eos=True))
    step = scheduler.step()
    assert step is not None and step.kind is StepKind.PREFILL
    scheduler.update(step, runner.execute(step))
    scheduler.add(request("long", 400, 4))
    kinds, starts = [], []
    for _ in range(6):
        step = scheduler.step()
        assert step is not None
        scheduler.update(step, runner.execute(step))
        kinds.append(step.kind)
        assert step.sequences[0].request_id == "talks", "a prompt must not stop a decode"
        starts += [s.start for s in step.sequences if s.request_id == "long"]
    assert kinds == [StepKind.MIXED] * 5 + [StepKind.DECODE]
    assert starts == [0, 95, 190, 285, 380, 400]


def test_decodes_cannot_starve_a_prompt():
    limits = replace(LIMITS, max_num_seqs=8, max_num_batched_tokens=4)
    scheduler = Scheduler(limits)
    runner = ShadowRunner(VOCAB, 4)
    for i in range(7):
        scheduler.add(request(f"talks{i}", 2, 400, ignore_eos=True))
    for _ in range(40):
        step = scheduler.step()
        assert step is not None
        scheduler.update(step, runner.execute(step))
    scheduler.add(request("prompt", 20, 1))
    served: dict[str, int] = {}
    for _ in range(21):
        step = scheduler.step()
        assert step is not None
        for part in step.sequences:
            served[part.request_id] = served.get(part.request_id, 0) + len(part.token_ids)
        scheduler.update(step, runner.execute(step))
    assert served["prompt"] == 20
    talks = [served[f"talks{i}"] for i in range(7)]
    assert max(talks) - min(talks) <= 1, "decodes that do not all fit take turns"


def test_a_short_prompt_overtakes_a_long_one_that_still_moves_on():
    scheduler = Scheduler(LIMITS)
    runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
    seen = Collected()
    for each in (request("long", 600, 2), request("short", 40, 2)):
        scheduler.add(each)
    step = scheduler.step()
    assert step is not None
    assert [(s.request_id, len(s.token_ids)) for s in step.sequences] == [
        ("long", 56),
        ("short", 40),
    ]
    seen.take(scheduler.update(step, runner.execute(step)))
    assert len(seen.tokens["short"]) == 1


def test_rows_for_prompts_are_split_between_the_oldest_and_the_shortest():
    split = SharedBudget()
    assert split.prefill_rows([1000], 64) == [64]
    assert split.prefill_rows([1000, 500, 20], 64) == [32, 12, 20]
    assert split.prefill_rows([10, 10], 64) == [10, 10]
    assert split.prefill_rows([1000, 1000], 64) == [64, 0]
    assert split.prefill_rows([5, 5], 0) == [0, 0]
    assert split.prefill_rows([5, 5], 1) == [1, 0]
    assert split.decode_rows(100, prefill_waits=False) == 100
    assert split.decode_rows(100, prefill_waits=True) == 75
    assert split.decode_rows(2, prefill_waits=True) == 1


def test_preemption_loses_nothing():
    """Three sequences that grow to five blocks each, in seven: the newest give way."""
    limits = replace(LIMITS, num_blocks=7)
    scheduler = Scheduler(limits)
    requests = [request(f"r{i}", 120, 400, ignore_eos=True) for i in range(3)]
    seen = drive(scheduler, requests)
    assert scheduler.counters.preemptions > 0
    assert_as_expected(seen, requests, limits)
    finished = list(seen.finished)
    assert finished == ["r0", "r1", "r2"], "the oldest is never preempted"


def test_priority_then_arrival():
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=1))
    requests = [
        request("late", 3, 1, priority=1),
        request("first", 3, 1),
        request("second", 3, 1),
        request("urgent", 3, 1, priority=-1),
    ]
    assert list(drive(scheduler, requests).finished) == ["urgent", "first", "second", "late"]


def test_max_tokens_zero_scores_the_prompt_only():
    requests = [request("a", 200, 0, prompt_logprobs=2), request("b", 640, 0)]
    seen = drive(Scheduler(LIMITS), requests)
    assert not seen.tokens
    assert seen.finished["a"].reason is FinishReason.LENGTH
    assert seen.finished["a"].usage == Usage(200, 0)
    logprobs = seen.prompts["a"].logprobs
    assert len(logprobs) == 200 and logprobs[0] is None
    assert list(seen.prompts) == ["a"]


def test_stop_tokens_are_counted_and_not_reported():
    free = request("free", (11, 12, 13), 40, ignore_eos=True)
    tokens, _, _ = expected(free)
    stop = tokens[5]
    assert stop not in tokens[:5]
    stopped = replace(
        free, sampling=replace(free.sampling, stop_token_ids=(stop,)), request_id="stopped"
    )
    seen = drive(Scheduler(LIMITS), [stopped])
    assert seen.tokens["stopped"] == tokens[:5]
    assert seen.finished["stopped"] == FinishEvent(
        "stopped", FinishReason.STOP, Usage(3, 6), stop_token_id=stop
    )


def test_output_is_clamped_to_the_context():
    req = request("r", 630, 100, ignore_eos=True)
    seen = drive(Scheduler(LIMITS), [req])
    assert seen.finished["r"].usage == Usage(630, 10)
    assert seen.finished["r"].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (request("r", 0), "empty_prompt", "empty"),
        (request("r", 640, 1), "context_length_exceeded", "640 tokens"),
        (request("r", 641, 0), "context_length_exceeded", "641 tokens"),
        (request("r", (1, 50)), "invalid_token_id", "token id 50"),
        (request("r", (1, -1)), "invalid_token_id", "token id -1"),
        (request("r", 3, stop_token_ids=(99,)), "invalid_token_id", "stop_token_ids"),
        (request("r", 3, logit_bias={77: 1.0}), "invalid_token_id", "logit_bias"),
        (request("r", 3, allowed_token_ids=(51,)), "invalid_token_id", "allowed_token_ids"),
        (request("r", 3, allowed_token_ids=()), "invalid_value", "allowed_token_ids"),
        (
            request("r", 3, allowed_token_ids=(EOS, 7), min_tokens=1, stop_token_ids=(7,)),
            "invalid_value",
            "allowed_token_ids",
        ),
    ],
)
def test_what_can_never_be_served_is_refused(bad, code, words):
    scheduler = Scheduler(LIMITS)
    with pytest.raises(RequestError, match=words) as caught:
        scheduler.add(bad)
    assert caught.value.code == code and caught.value.status == 400
    assert not scheduler.has_work


def test_too_many_blocks_are_refused_with_the_numbers():
    scheduler = Scheduler(replace(LIMITS, num_blocks=3))
    with pytest.raises(RequestError, match="needs 4 cache blocks of 128 tokens, and there are 3"):
        scheduler.add(request("r", 200, 186))
    assert_as_expected(drive(scheduler, [request("r", 200, 185)]), [request("r", 200, 185)])


def test_a_failed_sequence_leaves_the_others_alone():
    scheduler = Scheduler(LIMITS)
    runner = ShadowRunner(VOCAB, LIMITS.max_num_batched_tokens)
    requests = [request("good", 10, 5), request("bad", 10, 5)]
    for each in requests:
        scheduler.add(each)
    step = scheduler.step()
    assert step is not None
    output = runner.execute(step)
    broken = tuple(
        SequenceOutput("bad", error="its logits are not finite") if s.request_id == "bad" else s
        for s in output.sequences
    )
    seen = Collected()
    seen.take(scheduler.update(step, StepOutput(step.step_id, broken)))
    assert seen.finished["bad"].error == "its logits are not finite"
    while (step := scheduler.step()) is not None:
        seen.take(scheduler.update(step, runner.execute(step)))
    assert_as_expected(seen, requests[:1])
    assert scheduler.counters.errors == 1


def test_a_failed_step_ends_its_requests_and_frees_everything():
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=2))
    for name in "abc":
        scheduler.add(request(name, 10, 5))
    step = scheduler.step()
    assert step is not None
    events = scheduler.fail(step, "boom")
    assert [(e.request_id, e.reason, e.error) for e in events] == [
        ("a", FinishReason.ERROR, "boom"),
        ("b", FinishReason.ERROR, "boom"),
    ]
    scheduler.check()
    assert_as_expected(drive(scheduler, []), [request("c", 10, 5)])


class Oracle:
    """Drafts that are right up to a point that depends on the position."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        tokens = tuple(sequence.tokens)
        guesses: list[int] = []
        for i in range(most):
            token = next_token(tokens, VOCAB)
            guesses.append(token if (len(tokens) + i) % 3 else (token + 1) % VOCAB)
            tokens += (token,)
        return tuple(guesses)


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


@settings(deadline=None, max_examples=60)
@given(
    crowd=st.lists(additions, min_size=3, max_size=8),
    history=st.lists(operations, min_size=4, max_size=30),
    max_num_seqs=st.integers(1, 5),
    budget=st.sampled_from([2, 3, 17, 64, 300]),
    num_blocks=st.integers(5, 9),
    draft_rows=st.sampled_from([0, 0, 2]),
    depth=st.integers(0, 1),
)
def test_any_history(crowd, history, max_num_seqs, budget, num_blocks, draft_rows, depth):
    """Adds, aborts and steps in any order: budgets hold (the shadow asserts it), the cache never
    holds a stranger's token, every request ends as if it had been alone, and all is freed."""
    limits = replace(
        LIMITS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        draft_rows=draft_rows,
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

    ahead = Ahead(scheduler, runner, depth)

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
