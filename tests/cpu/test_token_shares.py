"""What ranks give each other in a prefill that is sharded over tokens, with names for rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import MetainferError
from metainfer.nn.token_shares import SharedRows, TokenShares, can_share
from metainfer.plan.dealing import Chunk

a_chunk = st.tuples(st.integers(0, 700), st.integers(1, 900)).map(
    lambda p: Chunk(p[0], p[0] + p[1])
)
steps = st.tuples(st.lists(a_chunk, min_size=1, max_size=4), st.integers(1, 5)).filter(
    lambda step: can_share(*step)
)

WINDOW = 128


def all_ranks(step: tuple[list[Chunk], int]) -> tuple[list[tuple[int, int]], list[TokenShares]]:
    """(sequence, position) of each row of the step, and what each rank computes."""
    chunks, ranks = step
    names = [(s, p) for s, chunk in enumerate(chunks) for p in range(chunk.first, chunk.stop)]
    return names, [TokenShares(chunks, ranks, rank) for rank in range(ranks)]


def extended(
    names: list[tuple[int, int]], shares: list[TokenShares], shared: list[SharedRows]
) -> list[list[tuple[int, int]]]:
    """Names of the extended rows of each rank, once all have given and taken."""
    own = [[names[row] for row in share.rows_T] for share in shares]
    pool = [rows[g] for rows, rank in zip(own, shared, strict=True) for g in rank.given_G]
    return [
        rows + [pool[place] for place in rank.taken] for rows, rank in zip(own, shared, strict=True)
    ]


@given(steps)
def test_ranks_have_all_rows_once(step):
    names, shares = all_ranks(step)
    rows = np.sort(np.concatenate([share.rows_T for share in shares]))
    assert rows.tolist() == list(range(len(names)))
    assert {share.most_rows for share in shares} == {max(len(share.rows_T) for share in shares)}
    for share in shares:
        sequences = [names[row][0] for row in share.rows_T]
        assert share.counts == tuple(sequences.count(s) for s in range(len(step[0])))


@pytest.mark.parametrize("kind", ["latents", "states 4", "states 128"])
@given(step=steps)
def test_readers_see_what_a_single_rank_sees(kind, step):
    chunks, _ = step
    names, shares = all_ranks(step)
    ratio, span = {"latents": (1, WINDOW), "states 4": (4, 8), "states 128": (128, 128)}[kind]
    shared = [
        share.latents(WINDOW) if kind == "latents" else share.states(ratio, span)
        for share in shares
    ]
    assert len({len(rank.given_G) for rank in shared}) == 1
    for share, rank, rows in zip(shares, shared, extended(names, shares, shared), strict=True):
        assert [names[row] for row in rank.rows_E] == rows
        source = [*zip(*(part.tolist() for part in rank.halo_H), strict=True), *rows]
        read = set()
        for reader in rank.readers:
            stop = reader.run.stop // ratio * ratio
            seen = [(reader.sequence, p) for p in range(reader.first, stop)]
            assert [source[place] for place in reader.rows_N] == seen
            if kind == "latents":
                assert reader.first == max(0, reader.run.first - WINDOW + 1)
                read |= {(reader.sequence, p) for p in range(reader.run.first, reader.run.stop)}
            else:
                assert reader.first == reader.run.first // ratio * ratio - (span - ratio)
                assert stop > reader.run.first
        if kind == "latents":
            assert read == {names[row] for row in share.rows_T}
        places = list(zip(*(part.tolist() for part in rank.places_K), strict=True))
        assert [rows[place] for place in rank.kept_K] == places
        for sequence, chunk in enumerate(chunks):
            kept_from = chunk.stop // ratio * ratio - (span - ratio)
            wanted = range(max(chunk.first, kept_from), chunk.stop)
            if kind == "latents":
                wanted = range(max(chunk.first, chunk.stop - WINDOW + 1), chunk.stop)
            assert [p for s, p in places if s == sequence] == list(wanted)


@pytest.mark.parametrize("ratio", [4, 128])
@given(step=steps)
def test_entries_are_in_order(ratio, step):
    chunks, _ = step
    _, shares = all_ranks(step)
    kinds = [share.entries(ratio) for share in shares]
    span = 8 if ratio == 4 else ratio
    pool = []
    for share, kind in zip(shares, kinds, strict=True):
        closed = [
            (reader.sequence, window)
            for reader in share.states(ratio, span).readers
            for window in range(reader.run.first // ratio, reader.run.stop // ratio)
        ]
        assert len(closed) <= kind.most
        pool += [*closed, *[None] * (kind.most - len(closed))]
    wanted = [
        (s, window)
        for s, chunk in enumerate(chunks)
        for window in range(chunk.first // ratio, chunk.stop // ratio)
    ]
    for kind in kinds:
        assert [pool[place] for place in kind.order] == wanted
        assert kind.counts == tuple(c.stop // ratio - c.first // ratio for c in chunks)


@given(steps, st.data())
def test_wanted_rows_are_found_again(step, data):
    chunks, _ = step
    names, shares = all_ranks(step)
    counts = [data.draw(st.integers(0, chunk.stop - chunk.first)) for chunk in chunks]
    pool, orders = [], []
    for share in shares:
        own_counts, most, order = share.wanted(counts)
        assert 0 < sum(own_counts) <= most
        own = []
        for sequence, count in enumerate(own_counts):
            rows = [names[row] for row in share.rows_T if names[row][0] == sequence]
            own += rows[len(rows) - count :]
        pool += [*own, *[None] * (most - len(own))]
        orders.append(order)
    wanted = [
        (s, p)
        for s, (chunk, count) in enumerate(zip(chunks, counts, strict=True))
        for p in range(chunk.stop - count, chunk.stop)
    ]
    for order in orders:
        assert [pool[place] for place in order] == wanted


def test_too_few_tokens():
    assert not can_share([Chunk(0, 100)], 2)
    with pytest.raises(MetainferError, match="2 ranks"):
        TokenShares([Chunk(0, 100)], 2, 0)


def test_few_rows_travel():
    """Of a chunk of 8,192 tokens on 8 ranks: a window for each of 16 pieces, and its end."""
    shares = TokenShares([Chunk(0, 8192)], 8, 3)
    assert len(shares.latents(WINDOW).given_G) == 2 * 127
    assert len(shares.states(4, 8).given_G) == 8
    assert len(shares.states(128, 128).given_G) == 0
