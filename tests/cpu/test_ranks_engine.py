"""An engine of several ranks, which are processes: it gives what an engine of one rank gives, and
leaves nobody behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import UserError
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import SamplingParams
from tests.fakes.engines import load_engine
from tests.fakes.random_models import HARD, RandomModel, random_model

TOLERANCE = 1e-4  # absolute, on log-probabilities
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=100, seed=5, max_tokens=24, ignore_eos=True, logprobs=3
)
Asked = Sequence[tuple[int, SamplingParams]]
ASKED = (
    (121, GREEDY),
    (118, DRAWN),
    (124, replace(DRAWN, frequency_penalty=0.7, logit_bias={3: 2.0}, prompt_logprobs=0)),
    (126, replace(GREEDY, max_tokens=9)),
    (37, replace(GREEDY, prompt_logprobs=2)),
    (1, replace(DRAWN, seed=6, repetition_penalty=1.3)),
)
"""Those that begin at once have room for their prompts, and outgrow it."""

FLAGS = {"num_blocks_override": 5, "max_num_batched_tokens": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, **HARD)
    return random_model(tmp_path_factory.mktemp("ranks") / "model", config, seed=2)


@pytest.fixture(scope="module")
def expected(model: RandomModel) -> list[Result]:
    with load_engine(model, **FLAGS) as engine:
        return ask(engine, model)


@pytest.fixture(scope="module")
def pair(model: RandomModel) -> Iterator[Engine]:
    with load_engine(model, tensor_parallel_size=2, **FLAGS) as engine:
        yield engine


def ask(engine: Engine, model: RandomModel, asked: Asked = ASKED) -> list[Result]:
    prompts = [model.tokens(length, seed=500 + length) for length, _ in asked]
    return generate(engine, prompts, [params for _, params in asked])


def assert_same(results: list[Result], expected: list[Result]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert (result.token_ids, result.reason, result.error) == (
            other.token_ids, other.reason, None,
        )  # fmt: skip
        for ours, theirs in (
            (result.logprobs, other.logprobs),
            (result.prompt_logprobs, other.prompt_logprobs),
        ):
            assert [one and one.token_id for one in ours] == [
                one and one.token_id for one in theirs
            ]
            assert [one.logprob for one in ours if one] == pytest.approx(
                [one.logprob for one in theirs if one], abs=TOLERANCE
            )


def processes_of(parent: int) -> set[int]:
    """Those that `parent` started and that have not ended."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                words = file.read().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if name.isdecimal() and int(words[1]) == parent and words[0] != "Z":
            found.add(int(name))
    return found


def test_two_ranks_give_what_one_gives(
    pair: Engine, model: RandomModel, expected: list[Result]
) -> None:
    """Prompts in chunks, sequences that lose their cache, all ways to sample."""
    assert_same(ask(pair, model), expected)
    stats = pair.stats()
    assert stats.alive and stats.num_preemptions > 0 and stats.num_errors == 0
    assert pair.plan.collectives.value == "host memory"


def test_requests_without_a_seed_are_drawn_alike_on_all_ranks(
    pair: Engine, model: RandomModel
) -> None:
    """Ranks compare what they drew from step to step."""
    drawn = [
        generate(pair, [model.tokens(9)], replace(DRAWN, seed=None, top_k=0, top_p=1.0))[0]
        for _ in range(2)
    ]
    assert all(result.error is None and len(result.token_ids) == 24 for result in drawn)
    assert drawn[0].token_ids != drawn[1].token_ids
    assert pair.stats().alive


def test_four_ranks_ahead_give_what_one_gives_and_end_with_the_engine(
    model: RandomModel, expected: list[Result]
) -> None:
    """Pairs of them share the tokens of prompts."""
    before = processes_of(os.getpid())
    ranks = {"tensor_parallel_size": 4, "prefill_context_parallel_size": 2}
    flags = {**ranks, "async_scheduling": True, **FLAGS}
    with load_engine(model, **flags) as engine:
        born = processes_of(os.getpid()) - before
        assert len(born) >= 3
        found = ask(engine, model, [(n, replace(p, max_tokens=5)) for n, p in ASKED])
    for few, whole in zip(found, expected, strict=True):
        assert few.error is None and few.token_ids == whole.token_ids[:5]
    assert len(processes_of(os.getpid()) & born) <= 1  # what tracks shared resources stays


def test_a_model_that_does_not_divide_is_refused_before_anything_starts(
    model: RandomModel,
) -> None:
    before = processes_of(os.getpid())
    with pytest.raises(UserError, match="cannot be divided over 3 ranks: attention heads: 8"):
        load_engine(model, tensor_parallel_size=3)
    assert processes_of(os.getpid()) == before


def test_caches_divided_over_ranks_give_what_one_gives(
    model: RandomModel, expected: list[Result]
) -> None:
    """Fewer blocks, of twice as many tokens."""
    sharded = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    flags = {**FLAGS, "num_blocks_override": 3}
    with load_engine(model, **sharded, **flags) as engine:
        assert_same(ask(engine, model), expected)
        stats, plan = engine.stats(), engine.plan
    assert stats.alive and stats.num_errors == 0
    assert plan.block_tokens == 256 and plan.exchange_bytes.value > 0
