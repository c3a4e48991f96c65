"""Tiles of the products of experts, by the rows that an expert has and by GPU."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.moe import ExpertsCase, ExpertsFp8RowsCase


@dataclass(frozen=True, slots=True)
class Tile:
    """
    Attributes:
        channels, step: rows of weights of a program (of gate and of up each), and columns of one
            step of the product.
        warps, stages: as Triton takes them.
        swap: the weights are the first operand.
        band: tiles of rows that share the weights that a cache holds.
        registers: of a thread at most; 0 for what the compiler takes.
    """

    channels: int
    step: int
    warps: int
    stages: int
    swap: bool = False
    band: int = 8
    registers: int = 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """
    Attributes:
        rows: slots of a tile, of both products.
    """

    rows: int
    gate_up: Tile
    down: Tile


# Rows that an expert has at most, on average, for tiles of so many slots.
_HEIGHTS = ((16, 10.0), (32, 24.0), (64, 400.0))
_TALLEST = 128


def height_of(case: ExpertsCase | ExpertsFp8RowsCase, rows: int, steps: int = 0) -> int:
    """Slots of a tile where `rows` rows choose evenly.

    Args:
        steps: to taller tiles, or below 0 to lower ones.
    """
    each = rows * case.selected / case.experts
    place = next((n for n, (_, most) in enumerate(_HEIGHTS) if each <= most), len(_HEIGHTS))
    heights = (*(height for height, _ in _HEIGHTS), _TALLEST)
    return heights[min(max(place + steps, 0), len(_HEIGHTS))]


def tiles_of(
    case: ExpertsCase | ExpertsFp8RowsCase,
    rows: int,
    capability: tuple[int, int],
    has_codes: bool,
    steps: int = 0,
) -> Tiles:
    """
    Args:
        has_codes: rows are e4m3 codes, not bf16.
        steps: as of `height_of`.
    """
    height = height_of(case, rows, steps)
    if case.dtype == "float32":
        return Tiles(min(height, 32), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    step = 128 if has_codes else 64
    if height <= 32:
        # Instructions of a warpgroup take 64 rows of the first operand at least.
        swap = capability == (9, 0)
        return Tiles(height, Tile(32, step, 4, 4, swap), Tile(64, step, 4, 4, swap))
    if height == _TALLEST and has_codes and capability == (9, 0):
        return Tiles(height, Tile(64, step, 8, 3), Tile(128, step, 8, 3))
    return Tiles(64, Tile(64, step, 8, 3), Tile(128, step, 8, 3))
