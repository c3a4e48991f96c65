"""Sampling: each rule against a plain computation, and rows that do not feel their neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from metainfer.core.errors import RequestError
from metainfer.core.events import TokenLogprob
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.sample import Draw, Row, SequenceSampling
from metainfer.llm.step import IN_FLIGHT
from tests.fakes.samplers import cpu_sampler

VOCAB = 100
EOS = 9


def sample(logits_RV: torch.Tensor, rows: list[Row]) -> list[Draw]:
    return cpu_sampler(logits_RV.shape[1]).launch(logits_RV, rows).wait()


def state(prompt=(1, 2, 3), output=(), **params) -> SequenceSampling:
    request = Request("r", tuple(prompt), SamplingParams(**params), arrival_s=0.0)
    made = SequenceSampling(request, (EOS,))
    made.accept(output)
    return made


def row(prompt=(1, 2, 3), output=(), drafts=(), **params) -> Row:
    made = state(prompt, output, **params)
    return Row(made, len(prompt) + len(output) + len(drafts), tuple(drafts))


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def greedy_after(logits_V: torch.Tensor, **params) -> int:
    (draw,) = sample(logits_V[None], [row(temperature=0.0, **params)])
    assert draw.error is None
    return draw.token_id


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = torch.zeros(2, VOCAB)
    logits[0, 40] = logits[0, 17] = 5.0
    draws = sample(logits, [row(temperature=0.0), row(temperature=1e-6)])
    assert [d.token_id for d in draws] == [17, 0]


def test_allowed_tokens_bias_and_min_tokens():
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[50], logits[60] = 9.0, 8.0, 7.0
    assert greedy_after(logits) == EOS
    assert greedy_after(logits, min_tokens=2, output=(4,)) == 50
    assert greedy_after(logits, min_tokens=2, output=(4, 4)) == EOS
    assert greedy_after(logits, min_tokens=2, stop_token_ids=(50,)) == 60
    assert greedy_after(logits, logit_bias={60: 3.0}) == 60
    assert greedy_after(logits, logit_bias={EOS: -100.0}) == 50
    assert greedy_after(logits, allowed_token_ids=(60, 70)) == 60
    assert greedy_after(logits, allowed_token_ids=(60, 70), logit_bias={70: 50.0}) == 70
    # A drafted token counts as output of the rows behind it.
    assert greedy_after(logits, min_tokens=2, output=(4,), drafts=(5,)) == EOS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_left_is_an_error_of_that_row(temperature):
    logits = some_logits(2)
    rows = [
        row(temperature=temperature, allowed_token_ids=(EOS,), min_tokens=1),
        row(temperature=0.0),
    ]
    impossible, fine = sample(logits, rows)
    assert impossible.error is not None and "no token" in impossible.error
    assert fine.error is None and fine.token_id == int(logits[1].argmax())


def test_penalties_follow_their_formulas():
    prompt, output = (1, 2, 3, 3), (5, 5, 2)
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    winners = set()
    for logits in some_logits(200):
        logits[[1, 2, 3, 5, 8]] += 6.0  # what is penalised competes with what is not
        expected = logits.clone()
        for token in (1, 2, 3, 5):
            value = expected[token]
            expected[token] = value / 1.3 if value > 0 else value * 1.3
        for token, count in ((5, 2), (2, 1)):
            expected[token] -= 0.4 * count + 0.7
        winner = int(expected.argmax())
        winners.add(winner)
        assert greedy_after(logits, prompt=prompt, output=output, **penalties) == winner
        # Drafts count like output.
        drafted = {"output": output[:1], "drafts": output[1:]}
        assert greedy_after(logits, prompt=prompt, **drafted, **penalties) == winner
    assert {1, 2, 3, 5, 8} <= winners


def test_a_token_that_is_only_on_the_device_counts_like_any_other():
    """The last one drawn of the row's slot, by a step whose results nobody has read."""
    sampler = cpu_sampler(VOCAB, num_slots=3)
    logits = some_logits(3)
    waiting = [row(temperature=0.0)._replace(slot=slot) for slot in (2, 0, 1)]
    drawn = [draw.token_id for draw in sampler.launch(logits, waiting).wait()]
    assert sampler.last_tokens_S[:3].tolist() == [drawn[1], drawn[2], drawn[0]]
    params = {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    again = some_logits(3, seed=1)
    for i, token in enumerate(drawn):
        again[i, [token, (token + 1) % VOCAB]] = torch.tensor([20.0, 19.0])
    unread = [row(drafts=(IN_FLIGHT,), **params)._replace(slot=slot) for slot in (2, 0, 1)]
    read = [row(output=(token,), **params) for token in drawn]
    found = [draw.token_id for draw in sampler.launch(again, unread).wait()]
    assert found == [draw.token_id for draw in sample(again, read)]
    assert found == [(token + 1) % VOCAB for token in drawn]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_least_repetition_penalty_leaves_numbers(temperature):
    logits = some_logits(1)
    logits[0, 1:4] = torch.tensor([-50.0, 60.0, 50.0])
    params = {"temperature": temperature, "repetition_penalty": 0.01}
    (draw,) = sample(logits, [row((1, 2, 3), **params)])
    assert draw.error is None and draw.token_id == 2
    with pytest.raises(RequestError, match=r"repetition_penalty must be between 0\.01 and 100"):
        SamplingParams(repetition_penalty=1e-40)  # it made logits infinite


def test_penalties_of_one_row_leave_the_others_alone():
    logits = some_logits(1)[0].expand(3, -1).clone()
    best = int(logits[0].argmax())
    rows = [
        row(temperature=0.0),
        row(output=(best,) * 50, temperature=0.0, frequency_penalty=2.0),
        row(temperature=0.0, presence_penalty=2.0),
    ]
    before = logits.clone()
    tokens = [d.token_id for d in sample(logits, rows)]
    assert tokens[0] == tokens[2] == best != tokens[1]
    assert torch.equal(logits, before), "the raw logits belong to the caller"


def test_logprobs_are_of_the_raw_distribution():
    logits = some_logits(3)
    raw = logits.log_softmax(-1)
    rows = [
        row(temperature=0.0, logprobs=3, logit_bias={7: 100.0}),
        row(temperature=0.0),
        row(temperature=2.0, seed=1, logprobs=0),
    ]
    first, second, third = sample(logits, rows)
    assert first.token_id == 7
    assert first.logprob is not None
    assert first.logprob.logprob == pytest.approx(float(raw[0, 7]), abs=1e-5)
    values, ids = raw[0].topk(3)
    assert [t for t, _ in first.logprob.top] == ids.tolist()
    assert [p for _, p in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprob is None
    assert third.logprob is not None and third.logprob.top == ()
    assert third.logprob.logprob == pytest.approx(float(raw[2, third.token_id]), abs=1e-5)


def test_token_logprobs_cut_each_row_at_its_own_number():
    logits = some_logits(2)
    one, other = cpu_sampler(VOCAB).token_logprobs(logits, [4, 5], [2, 0])
    assert isinstance(one, TokenLogprob) and len(one.top) == 2 and other.top == ()
    assert other.logprob == pytest.approx(float(logits[1].log_softmax(-1)[5]), abs=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(poison, temperature):
    logits = some_logits(3)
    rows = [row(temperature=temperature, seed=i, top_p=0.9, top_k=5) for i in range(3)]
    good = sample(logits, rows)
    bad = logits.clone()
    bad[1, 33] = poison
    draws = sample(bad, rows)
    assert draws[1].error is not None and "not finite" in draws[1].error
    assert [draws[0], draws[2]] == [good[0], good[2]]


def test_min_p_drops_what_is_small_against_the_best():
    logits = torch.full((VOCAB,), -10.0)
    logits[3], logits[4], logits[5] = 2.0, 1.9, -1.0
    seen = set()
    for seed in range(60):
        (draw,) = sample(logits[None], [row(temperature=1.0, min_p=0.5, seed=seed)])
        seen.add(draw.token_id)
    assert seen == {3, 4}


# ---- draws ----


def draws_of(logits_V: torch.Tensor, count: int, **params) -> torch.Tensor:
    """Histogram of `count` draws at as many positions and seeds, in batches."""
    histogram = torch.zeros(len(logits_V))
    for begin in range(0, count, 500):
        rows = [
            Row(state(temperature=1.0, seed=i % 7, **params), 3 + i)
            for i in range(begin, begin + 500)
        ]
        for draw in sample(logits_V.expand(500, -1), rows):
            histogram[draw.token_id] += 1
    return histogram


@pytest.mark.parametrize("vocab", [12, 37])
def test_draws_follow_the_distribution(vocab):
    """Chi-square over 6,000 draws; the bound is the 1 - 1e-6 quantile, and the seeds are fixed."""
    logits = some_logits(1, vocab)[0] / 2
    expected = logits.softmax(-1) * 6000
    histogram = draws_of(logits, 6000)
    chi2 = float(((histogram - expected) ** 2 / expected).sum())
    degrees = vocab - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees) + 15


def test_draws_never_leave_top_k():
    logits = some_logits(1)[0]
    allowed = set(logits.topk(4).indices.tolist())
    histogram = draws_of(logits, 1000, top_k=4)
    assert set(histogram.nonzero()[:, 0].tolist()) == allowed


def test_a_seeded_row_does_not_feel_its_neighbours():
    logits = some_logits(5, 4096)
    rows = [
        row(temperature=0.8, seed=11, top_p=0.9),
        row(temperature=0.0),
        row(temperature=1.5, seed=12, top_k=300, logprobs=2),
        row(temperature=1.0, seed=13, min_p=0.01, presence_penalty=0.5, output=(5, 6)),
        row(temperature=1.0, seed=14),
    ]
    together = sample(logits, rows)
    for i in range(5):
        (alone,) = sample(logits[i : i + 1], [rows[i]])
        assert alone.token_id == together[i].token_id
    (backwards) = sample(logits.flip(0), rows[::-1])
    assert [d.token_id for d in backwards[::-1]] == [d.token_id for d in together]


def test_seed_and_position_decide():
    logits = torch.zeros(1, 4096)

    def token(seed: int | None, position: int) -> int:
        return sample(logits, [Row(state(temperature=1.0, seed=seed), position)])[0].token_id

    assert token(5, 10) == token(5, 10)
    assert len({token(5, p) for p in range(20)}) > 15
    assert len({token(s, 10) for s in range(20)}) > 15
    assert len({token(None, 10) for _ in range(20)}) > 15


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.02}])
def test_the_reference_draws_the_same_tokens(params):
    """The fast way on the CPU and the plain one agree on luck and on what is kept."""
    logits = some_logits(40, 700)
    rows = [row(temperature=0.5 + i / 20, seed=i, **params) for i in range(40)]
    plain = cpu_sampler(700, kernel_order="*=reference").launch(logits, rows).wait()
    assert plain == sample(logits, rows)
    assert len({draw.token_id for draw in plain}) > 10


def test_a_warm_up_runs_every_kernel_in_every_form():
    sampler, forms = cpu_sampler(VOCAB), set()
    draw = sampler._draw
    sampler._draw = lambda *given: (
        forms.add((given[1] is None, given[2] is None, given[4])) or draw(*given)
    )
    sampler.warm_up()
    kinds = [(True, False), (False, False), (False, True)]
    assert forms == {(plain, *kind) for plain in (True, False) for kind in kinds}


def test_draw_is_plain_data():
    (draw,) = sample(some_logits(1), [row(temperature=0.0, logprobs=1)])
    assert isinstance(draw, Draw) and type(draw.token_id) is int
    assert type(draw.logprob.logprob) is float
    assert [type(x) for x in draw.logprob.top[0]] == [int, float]
