"""The scheduler: nobody starves, what cannot be served is refused, failures stay with their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.core.errors import RequestError
from metainfer.core.events import FinishEvent, FinishReason, Usage
from metainfer.llm.policy import SharedBudget
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.step import SequenceOutput, StepKind, StepOutput
from tests.fakes.scheduling import (
    EOS,
    LIMITS,
    VOCAB,
    Collected,
    assert_as_expected,
    drive,
    expected,
    request,
)
from tests.fakes.shadow import ShadowRunner


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
