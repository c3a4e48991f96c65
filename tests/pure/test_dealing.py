"""Tokens of a prefill step are dealt once each, evenly, and cut where no window is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import MetainferError
from metainfer.plan.dealing import Chunk, Run, deal, units

a_chunk = st.tuples(st.integers(0, 3000), st.integers(1, 3000)).map(
    lambda p: Chunk(p[0], p[0] + p[1])
)
steps = st.tuples(st.lists(a_chunk, min_size=1, max_size=5), st.integers(1, 8)).filter(
    lambda step: units(step[0]) >= step[1]
)


@given(steps)
def test_every_token_belongs_to_one_rank(step):
    chunks, ranks = step
    counts = [0] * ranks
    for chunk, runs in zip(chunks, deal(chunks, ranks), strict=True):
        assert (runs[0].first, runs[-1].stop) == (chunk.first, chunk.stop)
        for before, after in pairwise(runs):
            assert before.stop == after.first
            assert before.stop % 128 == 0
            assert before.owner != after.owner
        for run in runs:
            assert len(run) > 0
            counts[run.owner] += len(run)
    assert min(counts) > 0
    lacking = sum(units([chunk]) * 128 - (chunk.stop - chunk.first) for chunk in chunks)
    assert max(counts) - min(counts) <= 2 * 128 + lacking


@given(st.integers(2, 8), st.integers(4, 64))
def test_causal_work_is_even(ranks, pieces):
    """Pairs of a token and one before it, by rank, within a piece's worth of the mean."""
    length = ranks * 2 * pieces * 128
    work = [0.0] * ranks
    for run in deal([Chunk(0, length)], ranks)[0]:
        work[run.owner] += (run.stop**2 - run.first**2) / 2
    assert max(work) <= min(work) * 1.001


def test_there_and_back():
    assert deal([Chunk(0, 1024)], 2) == ((Run(0, 0, 256), Run(1, 256, 768), Run(0, 768, 1024)),)


def test_prompts_share_the_ranks():
    runs = deal([Chunk(0, 100), Chunk(130, 300), Chunk(0, 128)], 2)
    assert runs == ((Run(0, 0, 100),), (Run(1, 130, 300),), (Run(0, 0, 128),))


def test_too_few_tokens_are_refused():
    with pytest.raises(MetainferError, match="2 units"):
        deal([Chunk(0, 129)], 3)
