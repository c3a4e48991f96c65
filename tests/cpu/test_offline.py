"""generate(): prompts in, results out, over a whole engine without a model."""

from __future__ import annotations

import threading

import pytest

from metainfer.core.errors import RequestError
from metainfer.core.events import FinishReason
from metainfer.llm.admission import Limits
from metainfer.llm.offline import generate
from metainfer.llm.request import SamplingParams
from tests.fakes.shadow import next_token
from tests.fakes.shadow_engine import ShadowEngine

VOCAB = 97
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


def engine(**changes: int) -> ShadowEngine:
    limits = {
        "max_model_len": 512,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_queued_requests": 8,
        "num_blocks": 6,
    }
    return ShadowEngine(Limits(vocab_size=VOCAB, eos_token_ids=(1,), **{**limits, **changes}))


def expected(prompt: list[int], count: int) -> tuple[int, ...]:
    tokens = tuple(prompt)
    for _ in range(count):
        tokens = (*tokens, next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_results_come_in_the_order_of_the_prompts() -> None:
    prompts = [[3, 4], [5] * 200, [6], [7, 8, 9] * 30]
    sampling = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 4, 2)]
    with engine() as shadow:
        results = generate(shadow, prompts, sampling)
    for prompt, params, result in zip(prompts, sampling, results, strict=True):
        assert result.token_ids == expected(prompt, params.max_tokens or 0)
        assert result.reason is FinishReason.LENGTH and result.error is None
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.completion_tokens == params.max_tokens


def test_no_prompts_no_results() -> None:
    with engine() as shadow:
        assert generate(shadow, [], SAMPLING) == []


def test_more_prompts_than_the_queue_takes() -> None:
    prompts = [[2, n] for n in range(3, 20)]
    with engine(max_queued_requests=0) as shadow:
        results = generate(shadow, prompts, SAMPLING)
    assert [r.token_ids for r in results] == [expected(prompt, 6) for prompt in prompts]


def test_prompt_logprobs_are_part_of_the_result() -> None:
    with engine() as shadow:
        asked, other = generate(
            shadow, [[3, 4, 5], [6]], [SamplingParams(max_tokens=1, prompt_logprobs=0), SAMPLING]
        )
    assert [item and item.token_id for item in asked.prompt_logprobs] == [None, 4, 5]
    assert other.prompt_logprobs == ()


def test_a_prompt_that_can_never_be_served_ends_the_others() -> None:
    with engine() as shadow:
        with pytest.raises(RequestError, match="vocabulary"):
            generate(shadow, [[3] * 100, [VOCAB]], SamplingParams(ignore_eos=True))
        # The engine is free again, and the aborted one's last events disturb nobody.
        assert generate(shadow, [[4, 5]], SAMPLING)[0].token_ids == expected([4, 5], 6)
        assert shadow.stats().num_running == 0


def test_sampling_must_be_one_or_one_each() -> None:
    with engine() as shadow, pytest.raises(ValueError):
        generate(shadow, [[3], [4]], [SAMPLING])


def test_an_engine_that_stops_meanwhile_does_not_hang_anyone() -> None:
    with engine() as shadow:
        shadow.runner.pause_s = 0.01
        threading.Timer(0.1, shadow.__exit__).start()
        results = generate(shadow, [[3, 4]], SamplingParams(ignore_eos=True))
        assert results[0].reason is FinishReason.ABORT
        with pytest.raises(RequestError) as caught:
            generate(shadow, [[3, 4]], SAMPLING)
        assert caught.value.code == "engine_stopped"
