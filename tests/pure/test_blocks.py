"""Blocks and slots: what is given out, shared and taken back, and the check that finds mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.llm.blocks import Allocator, BlockPool, InvariantError


def test_blocks_for_counts_started_blocks():
    assert [blocks_for(n) for n in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)] == [0, 1, 1, 2]


def test_a_shared_block_is_free_only_after_its_last_owner():
    allocator = Allocator(3, "block")
    first = allocator.allocate(2)
    allocator.share(first[:1])
    assert allocator.references(first[0]) == 2
    allocator.release(first)
    assert allocator.num_free == 2
    allocator.check(first[:1])
    allocator.release(first[:1])
    assert allocator.num_free == 3
    allocator.check(())


def test_misuse_is_refused_by_name():
    allocator = Allocator(2, "slot")
    with pytest.raises(InvariantError, match="3 slots asked for, 2 are free"):
        allocator.allocate(3)
    with pytest.raises(InvariantError, match="slot 0 is shared but has no owner"):
        allocator.share((0,))
    (slot,) = allocator.allocate(1)
    allocator.release((slot,))
    with pytest.raises(InvariantError, match="freed twice"):
        allocator.release((slot,))


@pytest.mark.parametrize("held", [(), (0, 0), (1,), (0, 7)])
def test_check_finds_wrong_owners(held):
    pool = BlockPool(num_blocks=2, num_slots=1)
    assert pool.blocks.allocate(1) == (0,)
    pool.check((0,), ())
    with pytest.raises(InvariantError):
        pool.check(held, ())
    with pytest.raises(InvariantError):
        pool.check((0,), (0,))


@given(st.data())
def test_any_history_keeps_the_books_right(data):
    count = data.draw(st.integers(1, 6))
    allocator = Allocator(count, "block")
    held: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        choice = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if choice == "allocate":
            held += allocator.allocate(data.draw(st.integers(0, allocator.num_free)))
        elif held:
            block = data.draw(st.sampled_from(held))
            if choice == "share":
                allocator.share((block,))
                held.append(block)
            else:
                allocator.release((block,))
                held.remove(block)
        allocator.check(held)
        assert allocator.num_free == count - len(set(held))
