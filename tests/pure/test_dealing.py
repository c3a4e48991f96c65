"""Tokens are dealt once each, at places that no chunk moves, and evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import MetainferError
from metainfer.plan.dealing import Deal, Run

deals = st.builds(Deal, st.integers(1, 8), st.sampled_from([128, 256, 512, 1024]))
chunks = st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(lambda p: (p[0], p[0] + p[1]))


@given(deals, chunks)
def test_every_token_belongs_to_one_rank(deal, chunk):
    seen = [
        position
        for rank in range(deal.ranks)
        for run in deal.runs(*chunk, rank)
        for position in range(run.first, run.stop)
    ]
    assert sorted(seen) == list(range(*chunk))
    counts = deal.counts(*chunk)
    assert counts == tuple(sum(map(len, deal.runs(*chunk, rank))) for rank in range(deal.ranks))
    assert max(counts) - min(counts) <= deal.tokens


@given(deals, chunks, st.integers(0, 5000))
def test_a_chunk_moves_no_token(deal, chunk, cut):
    first, stop = chunk
    middle = min(max(first, cut), stop)
    for rank in range(deal.ranks):
        parts = (*deal.runs(first, middle, rank), *deal.runs(middle, stop, rank))
        positions = [p for run in parts for p in range(run.first, run.stop)]
        assert positions == [
            p for run in deal.runs(first, stop, rank) for p in range(run.first, run.stop)
        ]
        assert all(deal.owner(p) == rank for p in positions)


@given(deals, chunks)
def test_runs_of_a_rank_do_not_touch(deal, chunk):
    for rank in range(deal.ranks):
        runs = deal.runs(*chunk, rank)
        assert all(run.first < run.stop for run in runs)
        assert all(a.stop < b.first for a, b in pairwise(runs))


def test_two_ranks():
    deal = Deal(2, 256)
    assert deal.runs(100, 1000, 0) == (Run(100, 256), Run(512, 768))
    assert deal.runs(100, 1000, 1) == (Run(256, 512), Run(768, 1000))


@pytest.mark.parametrize(("ranks", "tokens"), [(0, 128), (2, 0), (2, 100)])
def test_refused(ranks, tokens):
    with pytest.raises(MetainferError, match="multiple of 128"):
        Deal(ranks, tokens)
