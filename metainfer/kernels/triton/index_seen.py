"""What rows of the indexer see, and the choice where nothing has to be scored."""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.topk_cut import NOTHING


@triton.jit(do_not_specialize=("rows", "entries"), do_not_specialize_on_alignment=("positions",))
def see_positions(positions, seen, rows, entries, RATIO: tl.constexpr, BLOCK: tl.constexpr):
    """int32 entries that rows at positions see."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + row, mask=row < rows, other=0)
    count = tl.minimum((position + 1) // RATIO, entries)
    tl.store(seen + row, count.to(tl.int32), mask=row < rows)


@triton.jit(do_not_specialize=("entries", "stride"), do_not_specialize_on_alignment=("key_rows",))
def see_lists(key_rows, seen, entries, stride, POINTS: tl.constexpr):
    """int32 length of each row's list, which -1 follows: POINTS places are looked at at a time."""
    row = tl.program_id(0).to(tl.int64)
    key_rows += row * stride
    point = tl.arange(0, POINTS)
    first = 0
    left = entries
    while left > 0:
        step = tl.cdiv(left, POINTS)
        place = point * step
        listed = tl.load(key_rows + first + place, mask=place < left, other=-1) >= 0
        count = tl.sum(listed.to(tl.int32), 0)
        # The end lies between the last point that is listed and the next.
        passed = tl.maximum((count - 1) * step + 1, 0)
        left = tl.where(count > 0, tl.minimum(step - 1, left - passed), 0)
        first += passed
    tl.store(seen + row, first)


@triton.jit(do_not_specialize=("width",))
def see_candidates(candidates, seen, width, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Replaces what a row sees by the number of places in its candidate blocks that it sees: only
    its last block may reach beyond."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    block = tl.load(candidates + row * width + place, mask=place < width, other=-1)
    count = tl.sum((block >= 0).to(tl.int32), 0)
    end = (tl.max(block, 0) + 1) * SIZE
    beyond = tl.maximum(end - tl.load(seen + row), 0)
    tl.store(seen + row, tl.maximum(count * SIZE - beyond, 0).to(tl.int32))


@triton.jit(do_not_specialize=("width",), do_not_specialize_on_alignment=("candidates",))
def take_all(
    seen, candidates, out, width, K: tl.constexpr, K_POWER: tl.constexpr, SIZE: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """Chooses all that a row sees, then -1: every group of PER entries; with candidates, entries in
    blocks of SIZE."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, K_POWER)
    is_seen = rank < tl.cdiv(tl.load(seen + row), PER)
    entry = rank.to(tl.int64)
    if candidates is not None:
        block = tl.load(candidates + row * width + rank // SIZE, mask=is_seen, other=0)
        entry = block * SIZE + rank % SIZE
    tl.store(out + row * K + rank, tl.where(is_seen, entry, -1), mask=rank < K)


@triton.jit
def best_in_blocks(
    scores, seen, out, seen_blocks, width, out_width, SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    """Program (row, BLOCKS blocks): the best score in each block of SIZE entries that the row sees,
    an infinite one in the newest block; and how many blocks it sees."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + row)
    blocks = tl.cdiv(count, SIZE)
    if tl.program_id(1) == 0:
        tl.store(seen_blocks + row, blocks)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(scores + row * width + place, mask=place < count, other=NOTHING)
    best = tl.where(block == blocks - 1, float("inf"), tl.max(x, 1))
    tl.store(out + row * out_width + block, best, mask=block < blocks)
