"""Sampling, op by op: numbers from the literature, and rules against a plain computation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.kernels.cpu import sample as fast
from metainfer.kernels.reference import sample as plain
from metainfer.kernels.reference.clocks import clocks, philox
from metainfer.ops.sample import WEIGHT_BITS, SampleCase


def words(*numbers: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([number]) for number in numbers)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected) -> None:
    """The vectors that come with the authors' code, Random123."""
    found = philox(words(*counter), words(*key))
    assert [int(word) for word in found] == list(expected)


def test_clocks_are_exponential_and_differ_by_seed_and_position() -> None:
    seeds = torch.tensor([5, -5, 5, 2**62, 5 + 2**32])
    positions = torch.tensor([7, 7, 8, 7, 7])
    times_NC = clocks(seeds, positions, 20_001)
    assert times_NC.shape == (5, 20_001) and (times_NC > 0).all() and times_NC.isfinite().all()
    # Mean and variance of Exp(1) are 1; of 20,001 they are within 6 standard errors.
    assert (times_NC.mean(-1) - 1).abs().max() < 6 / 20_000**0.5
    assert (times_NC.var(-1) - 1).abs().max() < 6 * (8 / 20_000) ** 0.5
    few = (times_NC < 0.01).double().mean(-1)
    assert (few - (1 - math.exp(-0.01))).abs().max() < 6 * (0.01 / 20_000) ** 0.5
    for row in range(1, 5):
        assert (times_NC[row] == times_NC[0]).double().mean() < 0.01
    # How many are wanted changes none of them.
    assert torch.equal(clocks(seeds, positions, 6), times_NC[:, :6])


def plain_keep(x_V: torch.Tensor, w_V: torch.Tensor, k: int, share: float) -> set[int]:
    """The rule, one token at a time, in whole numbers."""
    ids = sorted(range(len(x_V)), key=lambda i: (-float(x_V[i]), i))
    ids = ids[:k] if k > 0 else ids
    total = sum(int(w_V[i]) for i in ids)
    target = max(1, int(float(total) * float(torch.tensor(share, dtype=torch.float32))))
    kept: set[int] = set()
    reached = 0
    for i in ids:
        if share < 1.0 and reached >= target:
            break
        kept.add(i)
        reached += int(w_V[i])
    return {i for i in kept if w_V[i] > 0}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([3, 70, 600]),
    scale=st.sampled_from([0.0, 0.5, 3.0]),
    rules=st.lists(
        st.tuples(st.integers(-1, 90), st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01])),
        min_size=1,
        max_size=4,
    ),
)
def test_what_is_kept_follows_the_plain_rule(seed, vocab, scale, rules) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(len(rules), vocab, generator=generator) * scale * 8).round() / 8  # many ties
    settings_R3 = torch.tensor([[1.0, share, -math.inf] for _, share in rules])
    numbers_R3 = torch.tensor([[max(k, 0), 0, 0] for k, _ in rules])
    w = plain.weights(plain.scaled(x, settings_R3))
    kept = plain._kept(x, plain.scaled(x, settings_R3), w, settings_R3, numbers_R3)
    cut = w.clone()
    fast._keep_likeliest(x, cut, numbers_R3[:, 0], settings_R3[:, 1])
    for n, (k, share) in enumerate(rules):
        wanted = plain_keep(x[n], w[n], k, share)
        assert {i for i in range(vocab) if kept[n, i] and w[n, i] > 0} == wanted
        assert {i for i in range(vocab) if cut[n, i] > 0} == wanted
        assert torch.equal(cut[n][list(wanted)], w[n][list(wanted)])


def test_weights_are_whole_numbers_and_the_greatest_is_a_power_of_two() -> None:
    w = plain.weights(torch.tensor([0.0, -1.0, -20.0, -40.0, -math.inf]))
    assert w.tolist()[0] == 2**WEIGHT_BITS and w.tolist()[3:] == [0, 0]
    expected = [math.exp(y) * 2**WEIGHT_BITS for y in (-1.0, -20.0)]
    assert w[1:3].tolist() == pytest.approx(expected, rel=1e-6, abs=1.0)


@pytest.mark.parametrize("vocab", [1, 2, 3, 512, 129_280])
def test_stretches_cover_the_vocabulary(vocab) -> None:
    case = SampleCase(vocab)
    assert (case.stretches - 1) * case.stretch < vocab <= case.stretches * case.stretch
    assert case.stretch >= case.stretches
