"""The pace of prompts: sequences that decode never starve behind long ones, nor prompts behind
them, on a clock that steps move on by what their rows would take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from metainfer.llm.admission import Limits
from metainfer.llm.policy import Policies, TimeShare, Unhurried
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.step import Step, StepOutput
from tests.fakes.shadow import ShadowRunner

ROWS_PER_S, DECODE_S = 4000.0, 0.01
LIMITS = Limits(
    vocab_size=50,
    eos_token_ids=(7,),
    max_model_len=40_000,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    max_queued_requests=16,
    num_blocks=1000,
)


@dataclass
class Clock:
    """A scheduler's steps in their order, on a clock of its own."""

    scheduler: Scheduler
    depth: int
    now_s: float = 0.0
    token_times: dict[str, list[float]] = field(default_factory=dict)
    decode_alone_s: float = 0.0
    flights: list[tuple[Step, StepOutput]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = ShadowRunner(LIMITS.vocab_size, LIMITS.max_num_batched_tokens)

    def add(self, name: str, prompt: int, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(name, (11,) * prompt, sampling, 0.0))

    def advance(self) -> None:
        step = self.scheduler.step()
        if step is not None:
            self.flights.append((step, self.runner.execute(step)))
        if step is not None and len(self.flights) <= self.depth:
            return
        done, output = self.flights.pop(0)
        rows = done.num_rows - sum(len(s.token_ids) for s in done.sequences[: decoding(done)])
        seconds = DECODE_S + rows / ROWS_PER_S
        self.now_s += seconds
        self.decode_alone_s += seconds if not rows else 0.0
        for result in output.sequences:
            if result.token_ids:
                self.token_times.setdefault(result.request_id, []).append(self.now_s)
        self.scheduler.took(done, seconds)
        self.scheduler.update(done, output)
        self.scheduler.check()

    def gaps(self, name: str) -> list[float]:
        times = self.token_times[name]
        return [after - before for before, after in pairwise(times)]


def decoding(step: Step) -> int:
    return step.num_decode_sequences


def run(policies: Policies, depth: int, limits: Limits = LIMITS) -> Clock:
    """One sequence decodes while prompts of 80 s in all arrive."""
    clock = Clock(Scheduler(limits, policies), depth)
    clock.add("talks", 5, 30_000)
    for _ in range(20):
        clock.advance()
    for i in range(6):
        clock.add(f"long{i}", 30_000 if i % 2 else 3_000, 2)
    while "long5" not in clock.token_times:
        clock.advance()
    return clock


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_decoding_gets_its_share_and_is_never_kept_waiting_for_long(share, depth):
    clock = run(Policies(pace=TimeShare(share, longest_s=0.3)), depth)
    assert clock.decode_alone_s >= 0.95 * share * clock.now_s
    # The first step with rows of prompts is made before anybody knows how long that takes.
    gaps = sorted(clock.gaps("talks"))
    assert gaps[-1 - 1 - depth] <= 0.3 + 2 * DECODE_S
    mean_s = sum(gaps) / len(gaps)
    assert mean_s < 1.2 * DECODE_S / share
    # What is left is enough for prompts.
    prefill_s = (3 * 30_000 + 3 * 3_000) / ROWS_PER_S
    assert clock.now_s < 1.25 * prefill_s / (1.0 - share) + 1.0


def test_without_a_share_every_step_has_rows_of_prompts():
    clock = run(Policies(pace=TimeShare(0.0, longest_s=1e9)), 0)
    plain = run(Policies(pace=Unhurried()), 0)
    assert clock.token_times == plain.token_times
    assert max(plain.gaps("talks")) > 0.5


def test_prompts_alone_wait_for_nobody():
    times = []
    for pace in (Unhurried(), TimeShare(0.5, longest_s=0.3)):
        clock = Clock(Scheduler(LIMITS, Policies(pace=pace)), 1)
        for i in range(3):
            clock.add(f"r{i}", 10_000, 0)
        while clock.scheduler.has_work:
            clock.advance()
        times.append(clock.now_s)
    assert times[0] == times[1]


def test_a_step_that_took_for_ever_does_not_stop_prompts_for_ever():
    pace = TimeShare(0.5, longest_s=0.3)
    pace.began(0, decode_rows=1, prefill_rows=100)
    pace.took(0, seconds=1000.0)
    steps = 0
    while pace.prefill_rows(100) == 0:
        steps += 1
        pace.began(steps, decode_rows=1, prefill_rows=0)
        pace.took(steps, seconds=0.01)
    assert steps == pytest.approx(4 * 0.3 / 0.01, abs=2)
    assert pace.prefill_rows(100) == 16, "at that speed few rows take long enough"


def test_a_step_that_failed_is_left_out_of_account():
    pace = TimeShare(0.5, longest_s=0.3)
    for step in range(5):
        pace.began(step, decode_rows=1, prefill_rows=0)
    pace.took(4, seconds=0.01)
    assert pace.prefill_rows(77) == 77 and not pace._running


def test_a_small_budget_still_moves_prompts_on():
    limits = replace(LIMITS, max_num_batched_tokens=4)
    clock = Clock(Scheduler(limits, Policies(pace=TimeShare(0.5, longest_s=0.3))), 0)
    for i in range(6):
        clock.add(f"r{i}", 9, 40)
    while clock.scheduler.has_work:
        clock.advance()
    assert {name: len(times) for name, times in clock.token_times.items()} == dict.fromkeys(
        (f"r{i}" for i in range(6)), 40
    )
