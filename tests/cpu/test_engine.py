"""Engine over a random miniature: whatever else it does meanwhile, a request gets the tokens that
the model alone gives it.

Numbers differ in their last bits with the shape of a step. That matters where two experts score
the same up to those bits, so the prompts here are ones without such a tie.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer.arch.manifest import manifest
from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import RequestError
from metainfer.core.events import FinishReason, TokenLogprob
from metainfer.llm.client import EngineClient
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import SamplingParams
from metainfer.weights.index import SINGLE_NAME
from tests.fakes.engines import WithStrangers, load_engine
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model

TOLERANCE = 1e-4  # absolute, on log-probabilities
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=100, seed=5, max_tokens=24, ignore_eos=True, logprobs=3
)
# (tokens of the prompt, sampling): what every engine below is asked.
ASKED = (
    (150, GREEDY),
    (37, replace(GREEDY, max_tokens=100, prompt_logprobs=2)),
    (200, replace(DRAWN, seed=8, prompt_logprobs=0)),
    (1, DRAWN),
    (128, replace(DRAWN, seed=6, repetition_penalty=1.3, presence_penalty=0.5)),
    (63, SamplingParams(temperature=0.0, max_tokens=3, min_tokens=3, logit_bias={1: 100.0})),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return random_model(tmp_path_factory.mktemp("engine") / "model", tiny_config(**HARD), seed=2)


@pytest.fixture(scope="module")
def engine(model: RandomModel) -> Iterator[Engine]:
    with load_engine(model) as engine:
        yield engine
        assert_at_rest(engine)


@pytest.fixture(scope="module")
def prompts(model: RandomModel) -> list[list[int]]:
    return [model.tokens(length, seed=length) for length, _ in ASKED]


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[Result]:
    """What every request gets with the engine to itself and its prompt in one step."""
    return [
        generate(engine, [prompt], params)[0]
        for prompt, (_, params) in zip(prompts, ASKED, strict=True)
    ]


def ask(client: EngineClient, prompts: list[list[int]]) -> list[Result]:
    """All at once."""
    return generate(client, prompts, [params for _, params in ASKED])


def assert_at_rest(engine: Engine) -> None:
    """Nobody holds anything any more."""
    stats = engine.stats()
    assert stats.alive and stats.num_running == stats.num_waiting == stats.num_errors == 0
    assert (stats.num_free_blocks, stats.num_free_slots) == (stats.num_blocks, stats.num_slots)


def assert_same(results: list[Result], expected: list[Result]) -> None:
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert (result.token_ids, result.reason) == (other.token_ids, other.reason)
        assert (result.usage, result.error) == (other.usage, None)
        assert_close(result.logprobs, other.logprobs)
        assert_close(result.prompt_logprobs, other.prompt_logprobs)


def assert_close(
    some: tuple[TokenLogprob | None, ...], others: tuple[TokenLogprob | None, ...]
) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=TOLERANCE)


def test_steps_launched_ahead_give_what_each_gets_alone(
    model: RandomModel, prompts: list[list[int]], alone: list[Result]
) -> None:
    """With few blocks, so that sequences lose their cache with a token in flight too."""
    with load_engine(model, async_scheduling=True, num_blocks_override=6) as ahead:
        assert ahead.plan.async_scheduling.value == "on"
        for _ in range(2):
            assert_same(ask(ahead, prompts), alone)
        assert_at_rest(ahead)


@pytest.mark.parametrize("which", [0, 1])
def test_tokens_and_logprobs_are_those_of_the_model(
    model: RandomModel, prompts: list[list[int]], alone: list[Result], which: int
) -> None:
    prompt, result = prompts[which], alone[which]
    assert len(result.token_ids) == ASKED[which][1].max_tokens
    reference = Driver(load_model(model.directory, model.arch), model.arch)
    tokens = [*prompt, *result.token_ids]
    known_TV = reference.run(tokens).log_softmax(-1)
    for place, token in enumerate(result.token_ids, len(prompt)):
        assert token == int(known_TV[place - 1].argmax())
    places = torch.arange(1, len(tokens))
    expected = [None, *known_TV[places - 1, torch.tensor(tokens[1:])].tolist()]
    given = [None if item is None else item.logprob for item in result.prompt_logprobs]
    if given:
        assert given[0] is None
        assert given[1:] == pytest.approx(expected[1 : len(prompt)], abs=TOLERANCE)
    own = [item.logprob for item in result.logprobs]
    assert own == pytest.approx(expected[len(prompt) :], abs=TOLERANCE)


def test_prompt_logprobs_have_their_alternatives(
    model: RandomModel, prompts: list[list[int]], alone: list[Result]
) -> None:
    assert [len(result.prompt_logprobs) for result in alone] == [0, 37, 200, 0, 0, 0]
    known_TV = Driver(load_model(model.directory, model.arch), model.arch).run(prompts[1])
    best = known_TV.log_softmax(-1).topk(2)
    for place, item in enumerate(alone[1].prompt_logprobs[1:]):
        assert item is not None and item.token_id == prompts[1][place + 1]
        assert [token for token, _ in item.top] == best.indices[place].tolist()


def test_requests_at_once_get_what_each_gets_alone(
    engine: Engine, prompts: list[list[int]], alone: list[Result]
) -> None:
    assert_same(ask(engine, prompts), alone)
    assert_same(ask(engine, prompts), alone)
    assert_at_rest(engine)


@pytest.mark.parametrize("rows", [3, 50, 300])
def test_chunks_change_nothing(
    model: RandomModel, prompts: list[list[int]], alone: list[Result], rows: int
) -> None:
    with load_engine(model, max_num_batched_tokens=rows) as engine:
        assert_same(ask(engine, prompts), alone)
        assert engine.stats().num_steps > sum(map(len, prompts)) / rows
        assert_at_rest(engine)


def test_a_preempted_request_goes_on_as_if_nothing_had_been(model: RandomModel) -> None:
    prompts = [model.tokens(length, seed=500 + length) for length in (121, 118, 124, 126)]
    sampling = [GREEDY, DRAWN, replace(DRAWN, frequency_penalty=0.7, prompt_logprobs=0), GREEDY]
    # All have room for their prompts at once, and outgrow it.
    with load_engine(model, num_blocks_override=5) as engine:
        alone = [generate(engine, [prompts[n]], sampling[n])[0] for n in range(4)]
        assert engine.stats().num_preemptions == 0
        assert_same(generate(engine, prompts, sampling), alone)
        assert engine.stats().num_preemptions > 0
        assert_at_rest(engine)


def test_neighbours_that_are_aborted_leave_no_trace(
    model: RandomModel, prompts: list[list[int]], alone: list[Result]
) -> None:
    strangers = [model.tokens(20 + 41 * n, seed=1000 + n) for n in range(9)]
    with load_engine(model, max_num_batched_tokens=48, num_blocks_override=6) as engine:
        crowded = WithStrangers(engine, strangers, tokens=5)
        assert_same(ask(crowded, prompts), alone)
        assert crowded.num_aborted == len(strangers)
        assert_at_rest(engine)


def test_numbers_that_are_not_finite_end_their_own_request_alone(
    model: RandomModel, tmp_path: Path, prompts: list[list[int]], alone: list[Result]
) -> None:
    poison = next(
        token
        for token in range(2, model.arch.vocab_size)
        if not any(token in (*p, *r.token_ids) for p, r in zip(prompts, alone, strict=True))
    )
    spoilt = with_nan(model, tmp_path / "spoilt", poison)
    bad = [[*model.tokens(length, seed=length), poison, 3] for length in (5, 70, 200)]
    params = [replace(GREEDY, prompt_logprobs=0), DRAWN, GREEDY, *(own for _, own in ASKED)]
    with load_engine(spoilt, max_num_batched_tokens=100) as engine:
        results = generate(engine, bad + prompts, params)
        assert_same(results[3:], alone)
        for result in results[:3]:
            assert result.reason is FinishReason.ERROR and result.token_ids == ()
            assert result.error is not None and "not finite" in result.error
        assert_same(ask(engine, prompts), alone)  # in the slots and blocks that held NaN
        stats = engine.stats()
        assert stats.alive and stats.num_errors == 3
        assert stats.num_free_blocks == stats.num_blocks


def with_nan(model: RandomModel, directory: Path, token: int) -> RandomModel:
    """A copy of the checkpoint in which the embedding of `token` is NaN."""
    tensors = load_file(model.directory / SINGLE_NAME)
    tensors["embed.weight"][token] = torch.nan
    directory.mkdir()
    save_file(tensors, directory / SINGLE_NAME)
    shutil.copy(model.directory / "config.json", directory)
    return replace(model, directory=directory)


def test_a_seed_settles_the_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    seeded = [replace(DRAWN, seed=seed) for seed in (5, 6, 5, 2**62, -1)]
    results = generate(engine, [prompts[0]] * 5, seeded)
    tokens = [result.token_ids for result in results]
    assert tokens[0] == tokens[2]
    assert len(set(tokens)) == 4
    unseeded = generate(engine, [prompts[0]] * 2, replace(DRAWN, seed=None))
    assert unseeded[0].token_ids != unseeded[1].token_ids


def test_eos_and_stop_tokens_end_the_output(
    engine: Engine, prompts: list[list[int]], alone: list[Result]
) -> None:
    forced = alone[5]  # eos is the likeliest token by far, but not before min_tokens
    assert forced.reason is FinishReason.LENGTH and forced.token_ids[:3].count(1) == 0
    (ended,) = generate(engine, [prompts[5]], replace(ASKED[5][1], max_tokens=9))
    assert ended.reason is FinishReason.STOP and ended.stop_token_id == 1
    assert ended.token_ids == forced.token_ids
    greedy = alone[0].token_ids
    stop = next(token for n, token in enumerate(greedy) if n > 4 and token not in greedy[:n])
    (stopped,) = generate(engine, [prompts[0]], replace(GREEDY, stop_token_ids=(stop,)))
    assert stopped.stop_token_id == stop
    assert stopped.token_ids == greedy[: greedy.index(stop)]


def test_what_can_never_be_served_is_refused_at_once(engine: Engine) -> None:
    for prompt, params, code in (
        ([], GREEDY, "empty_prompt"),
        ([512], GREEDY, "invalid_token_id"),
        ([1] * 640, GREEDY, "context_length_exceeded"),
    ):
        with pytest.raises(RequestError) as caught:
            generate(engine, [[3, 4], prompt], params)
        assert caught.value.code == code
    assert len(generate(engine, [[3, 4]], replace(GREEDY, max_tokens=1))[0].token_ids) == 1


def test_max_tokens_none_fills_the_context(engine: Engine, model: RandomModel) -> None:
    (result,) = generate(engine, [model.tokens(600)], replace(GREEDY, max_tokens=None))
    assert result.reason is FinishReason.LENGTH
    assert len(result.token_ids) == 40


def test_drafting_blocks_are_said_to_be_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("metainfer"), "propagate", True)
    config = tiny_config(num_nextn_predict_layers=1, compress_ratios=[0, 0, 4, 128, 4, 0])
    model = random_model(tmp_path / "model", config)
    count = sum(name.startswith("mtp.") for name in manifest(model.arch))
    with caplog.at_level(logging.INFO, "metainfer"), load_engine(model):
        assert f"{count} tensors of drafting blocks are not used" in caplog.messages
