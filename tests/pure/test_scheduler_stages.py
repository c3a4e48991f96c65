"""The scheduler of a pipeline: steps in flight have different sequences, or chunks of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.llm.scheduler import Scheduler
from metainfer.llm.step import Step
from tests.fakes.scheduling import LIMITS, VOCAB, Ahead, assert_as_expected, drive, request
from tests.fakes.shadow import ShadowRunner


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_decode_different_sequences_at_the_same_time(stages: int) -> None:
    limits = replace(LIMITS, max_num_seqs=7, num_blocks=40, stages=stages)
    scheduler = Scheduler(limits)
    for number in range(7):
        scheduler.add(request(f"r{number}", 5, 30, ignore_eos=True))
    ahead = Ahead(scheduler, ShadowRunner(VOCAB, limits.max_num_batched_tokens), stages - 1)
    seen_full = 0
    while ahead.advance() is not None:
        flights: list[Step] = [step for step, _ in ahead.flights]
        names = [part.request_id for step in flights for part in step.sequences]
        assert len(set(names)) == len(names)
        decodes = [step.num_decode_sequences for step in flights]
        assert max(decodes, default=0) <= -(-7 // stages)
        seen_full += len(decodes) == stages - 1 and min(decodes) > 0
    assert seen_full > 20


def test_chunks_of_a_prompt_follow_each_other_without_results() -> None:
    limits = replace(LIMITS, stages=3)
    scheduler = Scheduler(limits)
    scheduler.add(request("long", 300, 3))
    steps = [scheduler.step() for _ in range(4)]
    assert [step and step.num_rows for step in steps] == [96, 96, 96, 12]
    assert scheduler.step() is None, "what the last chunk draws must be read first"


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_request_ends_as_if_it_had_been_alone(stages: int) -> None:
    """Preemption among them: the blocks are too few for all."""
    limits = replace(LIMITS, num_blocks=6, stages=stages)
    requests = [request(f"r{number}", 90 + 30 * number, 100) for number in range(4)]
    seen = drive(Scheduler(limits), requests, depth=stages)
    assert_as_expected(seen, requests, limits)
