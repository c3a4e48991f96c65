"""Sampling on this GPU: tokens of the reference, nothing that waits, and steps launched ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.sample import draw_tokens
from metainfer.kernels.platform import platform
from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.sample import Row, Sampler, SequenceSampling
from metainfer.llm.step import IN_FLIGHT
from metainfer.ops.sample import SampleCase
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

VOCAB = 129_280
ASKED = (
    {"temperature": 0.0},
    {"top_p": 0.9, "logprobs": 5},
    {"top_k": 40, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"min_p": 0.02, "logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 3},
)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["", "ties"])
@pytest.mark.parametrize("rules", ["greedy", "plain", "all"])
def test_tokens_of_the_reference_at_the_size_of_real_vocabularies(rules: str, kind: str) -> None:
    here, case = platform("cuda", None), SampleCase(VOCAB)
    backends = here.registry.backends("sample.draw")
    for seed in range(4):
        call = draw_tokens(case, Draw(seed, "cuda"), 64, kind=kind, rules=rules, adjusted=seed == 3)
        ours, theirs = (
            backends[name].run(case, *call.arguments) for name in ("triton", "reference")
        )
        # Where two scores are within a rounding of exp and log, either may win.
        assert int((ours != theirs).any(0).sum()) <= (0 if rules == "greedy" else 1)


def sampler() -> Sampler:
    here = platform("cuda", None)
    return Sampler(here.registry, here.target, VOCAB, torch.device("cuda"), num_slots=8)


def rows(drafts: tuple[int, ...] = ()) -> list[Row]:
    return [
        Row(
            SequenceSampling(
                Request(str(n), (1, 2, 3, 2), SamplingParams(seed=n, **asked), 0.0), (0,)
            ),
            4 + len(drafts),
            drafts,
            n,
        )
        for n, asked in enumerate(ASKED)
    ]


def test_a_launch_waits_for_nothing() -> None:
    made = sampler()
    logits_RV = torch.randn(len(ASKED), VOCAB, device="cuda") * 3
    first = made.launch(logits_RV, rows()).wait()
    with no_waiting():
        draws = made.launch(logits_RV, rows())
        more = made.launch(logits_RV, rows((IN_FLIGHT,)))
    assert draws.wait() == first
    known = sampler()
    told = [
        row._replace(drafts=(draw.token_id,))
        for row, draw in zip(rows((IN_FLIGHT,)), first, strict=True)
    ]
    assert more.wait() == known.launch(logits_RV, told).wait()


def answers(**flags) -> list[tuple]:
    """One request at a time, so that steps are the same."""
    settings = EngineSettings(device="cuda", max_model_len=1024, max_num_seqs=4, **flags)
    prompts = [list(range(10, 10 + length)) for length in (5, 120, 127, 700)]
    results = []
    with Engine.load(pebble_dir(), settings) as engine:
        for number, prompt in enumerate(prompts):
            for asked in ASKED:
                params = SamplingParams(seed=number, max_tokens=30, **asked)
                results += generate(engine, [prompt], params)
    assert all(result.error is None for result in results)
    return [(result.token_ids, result.reason, result.logprobs) for result in results]


def test_steps_launched_ahead_give_the_same_answers() -> None:
    assert answers(async_scheduling=True) == answers(async_scheduling=False)


def test_many_at_once_end_as_they_should_when_launched_ahead() -> None:
    settings = EngineSettings(device="cuda", max_num_seqs=4, num_blocks_override=8)
    params = [SamplingParams(max_tokens=200, ignore_eos=True, **asked) for asked in ASKED]
    prompts = [list(range(10 + n, 260 + n)) for n in range(len(ASKED))]
    with Engine.load(pebble_dir(), settings) as engine:
        assert engine.plan.async_scheduling.value == "on"
        results = generate(engine, prompts, [replace(one, seed=3) for one in params])
        stats = engine.stats()
    assert [len(result.token_ids) for result in results] == [200] * len(ASKED)
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
