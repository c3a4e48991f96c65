"""Tiles of the products of experts, by the rows that an expert has and by GPU."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.kernels.triton.launch import shared_limit
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
    """

    channels: int
    step: int
    warps: int
    stages: int
    swap: bool = False
    band: int = 8


@dataclass(frozen=True, slots=True)
class Tiles:
    """
    Attributes:
        rows: slots of a tile, of both products.
    """

    rows: int
    gate_up: Tile
    down: Tile


def height_of(case: ExpertsCase | ExpertsFp8RowsCase, rows: int) -> int:
    """Slots of a tile where `rows` rows choose evenly."""
    each = rows * case.selected / case.experts
    for height, most in ((16, 10), (32, 24), (64, 96)):
        if each <= most:
            return height
    return 128


def tiles_of(
    case: ExpertsCase | ExpertsFp8RowsCase,
    rows: int,
    capability: tuple[int, int],
    has_codes: bool,
) -> Tiles:
    """
    Args:
        has_codes: products are of e4m3 codes, not of bf16.
    """
    height = height_of(case, rows)
    roomy = shared_limit(capability) > 120 * 1024
    if case.dtype == "float32":
        return Tiles(min(height, 32), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    if height <= 32:
        step = 128 if has_codes or roomy else 64
        return Tiles(height, Tile(32, step, 4, 3), Tile(32, step, 4, 3))
    step = 128 if has_codes else 64
    if height == 64 or not roomy:
        return Tiles(64, Tile(64, step, 4, 3), Tile(128, step, 4, 3))
    return Tiles(128, Tile(64, step, 8, 3), Tile(128, step, 8, 3))
