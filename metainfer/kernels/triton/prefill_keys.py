"""Which keys a row of sparse prefill sees, tile by tile, for the kernels in Gluon.

A row's keys are numbered: first the tiles of its window, then those of its entries. Shape suffixes:
N keys of a tile, in whatever layout the caller counts them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9 renamed both.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# Parameters of the kernels of sparse prefill for which there is one code, whatever their values.
NUMBERS = ("columns", "table_stride", "selected_stride")
LISTS = ("positions", "latent_rows", "sink", "table", "sequence", "selected", "lse")


@gluon.jit
def names_of(listed, place_N, columns, seen, SELECTED: gl.constexpr):
    """Numbers of the entries in places of a row's list, -1 where it sees none.

    Args:
        listed: the row's list, or anything where it sees all entries.
        columns: length of the list.
        seen: entries below this number are seen.
    """
    if SELECTED:
        inside_N = (place_N >= 0) & (place_N < columns)
        name_N = gl.load(listed + place_N, mask=inside_N, other=-1)
    else:
        name_N = place_N.to(gl.int64)
    return gl.where((name_N >= 0) & (name_N < seen), name_N, -1)


@gluon.jit
def addresses_of(
    name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
    tile, window_tiles, offset_N, BN: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr,
    TABLE: gl.constexpr,
):  # fmt: skip
    """(where the keys of a tile begin, which of them there are).

    Args:
        name_N: numbers of entries, -1 where there is none, as `names_of` gives for this tile.
        rows_of: cache rows by number of entry, or where there is no table the row of entry 0.
        low, last: first and last row of the latents that the row sees.
    """
    if RATIO > 0:
        there_N = name_N >= 0
        row_N = gl.load(rows_of + name_N, mask=there_N, other=0) if TABLE else rows_of + name_N
        at_N = entries + row_N * entry_stride
    if WINDOW > 0:
        near_N = low + tile * BN + offset_N
        near_at_N = latents + near_N * latent_stride
        if RATIO > 0:
            at_N = gl.where(tile < window_tiles, near_at_N, at_N)
            there_N = gl.where(tile < window_tiles, near_N <= last, there_N)
        else:
            at_N = near_at_N
            there_N = near_N <= last
    return gl.multiple_of(at_N, 16), there_N


@gluon.jit
def seen_of(
    name_N, low, last, tile, window_tiles, offset_N,
    BN: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr,
):  # fmt: skip
    """Which keys of a tile there are, without where."""
    there_N = name_N >= 0
    if WINDOW > 0:
        near_N = low + tile * BN + offset_N <= last
        there_N = gl.where(tile < window_tiles, near_N, there_N) if RATIO > 0 else near_N
    return there_N


@gluon.jit
def extent_of(
    t, p, latent_rows, table, sequence, selected, columns, table_stride, selected_stride,
    BN: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr, SELECTED: gl.constexpr,
    SEQUENCES: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """(low, last, window_tiles, tiles, seen, listed, rows_of) of row t at position p."""
    low = p
    last = p
    seen = p * 0
    window_tiles = 0
    tiles = 0
    listed = seen
    rows_of = p * 0
    if TABLE and RATIO > 0:
        rows_of = table
    if WINDOW > 0:
        last = gl.load(latent_rows + t)
        low = last - gl.minimum(p, WINDOW - 1)
        window_tiles = (last - low + BN).to(gl.int32) // BN
    if RATIO > 0:
        seen = (p + 1) // RATIO
        if SEQUENCES:
            rows_of += gl.load(sequence + t) * table_stride
        if SELECTED:
            listed = selected + t * selected_stride
            tiles = (columns + BN - 1) // BN
        else:
            seen = gl.minimum(seen, columns)
            tiles = (seen.to(gl.int32) + BN - 1) // BN
    return low, last, window_tiles, tiles + window_tiles, seen, listed, rows_of
