"""How products with weights are started: few rows, bound by reading the weight, and many.

Few rows take codes as they are. Many take codes where matrix units multiply e4m3 in groups of 64
columns and more; else both sides are decoded to bf16 first, which is exact and costs a few percent
of a large product: the units multiply each number hundreds of times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from metainfer.kernels.triton.launch import (
    Launcher,
    cdiv,
    has_fp8,
    next_power_of_2,
    shared_limit,
)
from metainfer.kernels.triton.product_few import add_partials, few_products
from metainfer.kernels.triton.product_tall import decoded_rows, tall_products

FEW_ROWS = 64
_LEAST_TILE = 16  # rows of the smallest tile of a weight
_NARROWEST_CODES = 64  # columns that codes of many rows are multiplied at a time
_PROGRAMS = 3  # of few rows, that a multiprocessor shall have
_MOST_SPLITS = 16
_HIGH = 8
_BYTES = {"fp8": 1, "half": 1, "bf16": 2, "fp32": 4}


class Weight(NamedTuple):
    """Numbers [P, G * O, I], parts that add up to the weight, or codes uint8 of as many dimensions
    with scales of their blocks; tickets int32, zero between products."""

    numbers_POI: torch.Tensor
    scales_BB: torch.Tensor | None
    tickets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes:
    groups, rows, columns: G, and O and I of each group's weight.
    block: of the weight that shares a scale.
    group: channels of a row that share a scale.
    """

    groups: int
    rows: int
    columns: int
    block: tuple[int, int] = (1, 1)
    group: int = 1


@dataclass(frozen=True, slots=True)
class Tile:
    """Attributes:
    rows: of x.
    outputs, step: rows of the weight, and columns that are multiplied at a time.
    splits: slices of the columns, for few rows.
    ticket: whether the last program adds the slices, or a second launch.
    """

    rows: int
    outputs: int
    step: int
    warps: int
    stages: int
    splits: int = 1
    ticket: bool = True


def weight_of(
    numbers_POI: torch.Tensor, scales_BB: torch.Tensor | None, sizes: tuple[int, int]
) -> Weight:
    """
    Args:
        sizes: groups, and rows of each.
    """
    tiles = sizes[0] * cdiv(sizes[1], _LEAST_TILE)
    tickets = torch.zeros(tiles, dtype=torch.int32, device=numbers_POI.device)
    return Weight(numbers_POI.contiguous(), scales_BB, tickets)


def form_of(launch: Launcher, x: torch.Tensor, numbers: torch.Tensor) -> str:
    """As what a kernel multiplies (`product_operands`)."""
    if x.dtype is torch.uint8:
        return "fp8" if has_fp8(launch) else "half"
    return "fp32" if x.dtype is torch.float32 else "bf16"


def product(
    launch: Launcher,
    sizes: Sizes,
    weight: Weight,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> torch.Tensor:
    """y [T, G * O] in `dtype`; x is [T, G * I], its rows dense. `tile` for experiments."""
    y = x.new_empty((len(x), sizes.groups * sizes.rows), dtype=dtype)
    if not len(x):
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    if len(x) <= FEW_ROWS:
        _few(launch, sizes, weight, x, x_scales, y, tile)
        return y
    numbers = weight.numbers_POI
    if numbers.dtype is torch.uint8 and not multiplies_codes(launch, sizes, x):
        weight, x, x_scales = _decoded(launch, sizes, weight, x, x_scales)
    _tall(launch, sizes, weight, x, x_scales, y, tile)
    return y


def multiplies_codes(launch: Launcher, sizes: Sizes, x: torch.Tensor) -> bool:
    """Whether many rows are multiplied as codes."""
    narrowest = min(sizes.group, sizes.block[1])
    return x.dtype is torch.uint8 and has_fp8(launch) and narrowest >= _NARROWEST_CODES


def few_tile(launch: Launcher, sizes: Sizes, weight: Weight, form: str, rows: int) -> Tile:
    """For at most `FEW_ROWS` rows. The same for all counts of rows up to the next power of two."""
    height = max(16, next_power_of_2(rows))
    if form == "fp32":
        return _split(launch, sizes, weight, Tile(height, 32, _step(32, sizes, weight), 4, 2))
    step = _step(128 // _BYTES[form], sizes, weight)
    # Sums of 64 rows are too many for the registers of the program that ends last.
    tile = Tile(height, 64, step, 4, 4 if height == FEW_ROWS else 5, ticket=height < FEW_ROWS)
    if step * _BYTES[form] <= 32:
        tile = replace(tile, outputs=128 if height < FEW_ROWS else 64, stages=6)
    return _split(launch, sizes, weight, tile)


def _split(launch: Launcher, sizes: Sizes, weight: Weight, tile: Tile) -> Tile:
    """With so many slices that multiprocessors are busy, but partial results are small beside the
    weight."""
    tiles = sizes.groups * cdiv(sizes.rows, tile.outputs)
    steps = len(weight.numbers_POI) * cdiv(sizes.columns, tile.step)
    wanted = _PROGRAMS * launch.multiprocessors // tiles
    wanted = min(wanted, _MOST_SPLITS, steps // 2, sizes.columns // (8 * tile.rows))
    share = cdiv(steps, max(1, wanted))
    return replace(tile, splits=cdiv(steps, share))


def tall_tile(launch: Launcher, sizes: Sizes, weight: Weight, form: str, rows: int) -> Tile:
    """For more rows."""
    if form == "fp32":
        return Tile(64, 64, _step(32, sizes, weight), 4, 2)
    step = _step(128 // _BYTES[form], sizes, weight)
    tiles = cdiv(rows, 128) * cdiv(sizes.rows, 128) * sizes.groups
    if tiles < launch.multiprocessors:
        return Tile(64, 64, step, 4, 4)
    return Tile(128, 128, step, 8, 3 if shared_limit(launch.capability) < 128 * 1024 else 4)


def _step(most: int, sizes: Sizes, weight: Weight) -> int:
    """Columns of a step: of one group and one block where there are scales."""
    if weight.scales_BB is None:
        return most
    return min(most, sizes.block[1], sizes.group if sizes.group > 1 else most)


def _few(
    launch: Launcher,
    sizes: Sizes,
    weight: Weight,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile | None,
) -> None:
    form = form_of(launch, x, weight.numbers_POI)
    tile = tile or few_tile(launch, sizes, weight, form, len(x))
    partials = None
    if tile.splits > 1:
        partials = x.new_empty((tile.splits, *y.shape), dtype=torch.float32)
    launch(
        few_products,
        (cdiv(sizes.rows, tile.outputs), tile.splits, sizes.groups),
        x,
        x_scales,
        weight.numbers_POI,
        weight.scales_BB,
        partials,
        weight.tickets if tile.splits > 1 and tile.ticket else None,
        y,
        *_numbers(sizes, weight, x, x_scales),
        num_warps=tile.warps,
        num_stages=tile.stages,
        SPLITS=tile.splits,
        **_constants(launch, sizes, weight, form, tile),
    )
    if tile.splits > 1 and not tile.ticket:
        block = 1024
        grid = (cdiv(y.numel(), block),)
        launch(add_partials, grid, partials, y, y.numel(), SPLITS=tile.splits, BLOCK=block)


def _tall(
    launch: Launcher,
    sizes: Sizes,
    weight: Weight,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile | None,
) -> None:
    form = form_of(launch, x, weight.numbers_POI)
    tile = tile or tall_tile(launch, sizes, weight, form, len(x))
    tiles = cdiv(len(x), tile.rows) * cdiv(sizes.rows, tile.outputs)
    launch(
        tall_products,
        (tiles, sizes.groups),
        x,
        x_scales,
        weight.numbers_POI,
        weight.scales_BB,
        y,
        *_numbers(sizes, weight, x, x_scales),
        num_warps=tile.warps,
        num_stages=tile.stages,
        HIGH=_HIGH,
        **_constants(launch, sizes, weight, form, tile),
    )


def _numbers(
    sizes: Sizes, weight: Weight, x: torch.Tensor, x_scales: torch.Tensor | None
) -> tuple[int, ...]:
    """Sizes and distances, as both kernels take them."""
    return (
        len(x),
        sizes.rows,
        sizes.columns,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        0 if weight.scales_BB is None else weight.scales_BB.stride(0),
        sizes.groups * sizes.rows * sizes.columns,
    )


def _constants(
    launch: Launcher, sizes: Sizes, weight: Weight, form: str, tile: Tile
) -> dict[str, int | str]:
    """As both kernels take them."""
    in_one = sizes.block[0] % tile.outputs == 0
    in_one &= sizes.groups == 1 or sizes.rows % tile.outputs == 0
    return {
        "FORM": form,
        "FP8": has_fp8(launch),
        "PARTS": len(weight.numbers_POI),
        "GROUP": sizes.group,
        "BLOCK_O": sizes.block[0],
        "BLOCK_I": sizes.block[1],
        "ONE_SCALE": in_one,
        "EVEN": sizes.columns % tile.step == 0,
        "BM": tile.rows,
        "BN": tile.outputs,
        "BK": tile.step,
        "UPCAST": launch.interpreted,
    }


def _decoded(
    launch: Launcher,
    sizes: Sizes,
    weight: Weight,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
) -> tuple[Weight, torch.Tensor, torch.Tensor | None]:
    """Weight and rows as numbers of the format of x, bf16 for codes. Scales that are powers of two
    are multiplied in, which is exact; where any is not, scales stay beside the numbers."""
    dtype = torch.bfloat16 if x.dtype is torch.uint8 else x.dtype
    scales = weight.scales_BB
    exact = scales is not None and scales.dtype is torch.uint8
    exact &= x_scales is None or x_scales.dtype is torch.uint8
    codes_OI = weight.numbers_POI[0]
    numbers_OI = _numbers_of(launch, codes_OI, scales if exact else None, sizes.block, dtype)
    if x.dtype is torch.uint8:
        x = _numbers_of(launch, x, x_scales if exact else None, (1, sizes.group), dtype)
    kept = Weight(numbers_OI.unsqueeze(0), None if exact else scales, weight.tickets)
    return kept, x, None if exact else x_scales


def _numbers_of(
    launch: Launcher,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, columns = codes.shape
    numbers = codes.new_empty((rows, columns), dtype=dtype)
    height, width = 8, 512
    launch(
        decoded_rows,
        (cdiv(rows, height), cdiv(columns, width)),
        codes,
        scales,
        numbers,
        rows,
        columns,
        codes.stride(0),
        0 if scales is None else scales.stride(0),
        BLOCK_O=block[0],
        BLOCK_I=block[1],
        FP8=has_fp8(launch) and not launch.interpreted,
        ROWS=height,
        WIDTH=width,
    )
    return numbers
