"""Tiles of rows, so that temporaries stay small whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

# 2 MB of fp32: larger temporaries leave the cache, and each costs page faults anew.
TILE_ELEMENTS = 2**19


def row_tiles(rows: int, row_elements: int, most: int = TILE_ELEMENTS) -> Iterator[slice]:
    """Slices that cover `rows` rows, each of at most `most` elements, or of one row."""
    step = max(1, most // max(1, row_elements))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def is_one_tile(rows: int, row_elements: int) -> bool:
    """Whether `row_tiles` gives one slice at most: then nothing needs slicing."""
    return rows * row_elements <= TILE_ELEMENTS
