"""Products of up to 16 rows with weights at the bandwidth of memory (few_rows.cu).

More rows go to cuBLAS or to Triton's kernels, which are prepared from the same weights: nothing is
kept twice. A weight is cut into tiles of 16 rows; warps of a block share a tile's columns where
there are too few tiles for all of them (`arrangement`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from metainfer.kernels.gpu.program import CudaKernel, compiler
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Variant, Verdict, no
from metainfer.kernels.torch_products import dense as torch_dense
from metainfer.kernels.torch_products import scaled
from metainfer.kernels.torch_products.dense import NAME as TORCH
from metainfer.kernels.torch_products.scaled import Scaled
from metainfer.kernels.triton import linear
from metainfer.kernels.triton.backend import NAME as TRITON
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher, cdiv, has_fp8
from metainfer.kernels.triton.product import Sizes, Weight
from metainfer.ops.base import Target
from metainfer.ops.linear import DenseCase, Fp8RowsCase, GroupedCase, GroupedFp8RowsCase

FEW_ROWS = 16
NAME = "cuda"

_UNIT = 128  # bytes of a row of the weight that are read at a time, and columns of a group
_NARROW = 32  # columns of a group where they are fewer, and side of a block then
_TILE = 16
_PADDED = 20
_WARPS = 16  # of a multiprocessor: one block of as many or two of half
_FOLDER = Path(__file__).parent
KERNELS = {warps: CudaKernel("few_rows", 32 * warps, _FOLDER) for warps in (8, 16)}
_HOPPER = Target("cuda", (9, 0))
# Generations whose matrix units take e4m3 codes for so few rows; others would convert each again.
_TAKES_CODES = ((8, 9), (12, 0))

# Rough times of one multiprocessor in cycles: a unit at its share of the bandwidth and at most,
# from asking for units until they are there, and to add the sums of two slices.
_UNIT_CYCLES, _QUICKEST, _LATENCY, _ADDING = 114, 50, 1500, 100

CodesCase = Fp8RowsCase | GroupedFp8RowsCase


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Attributes:
    warps: of a block, 8 or 16.
    slices: warps that share the columns of a tile, a power of two.
    depth: units that a warp reads ahead.
    """

    warps: int
    slices: int
    depth: int


@cache
def arrangement(
    groups: int, tiles: int, units: int, processors: int, depth: int = 3, place: int = 0
) -> Arrangement:
    """The one that takes least time on paper.

    Args:
        tiles: of a group.
        units: of a tile.
        place: of the one that is taken, among all by that time; 0 for the best.
    """
    slices = [2**log2 for log2 in range(_WARPS.bit_length()) if 2**log2 <= max(1, units)]
    made = [Arrangement(warps, n, depth) for warps in KERNELS for n in slices if n <= warps]
    made.sort(key=lambda one: _cycles(one, groups, tiles, units, processors))
    return made[min(place, len(made) - 1)]


def _cycles(one: Arrangement, groups: int, tiles: int, units: int, processors: int) -> float:
    blocks = groups * cdiv(tiles, one.warps // one.slices)
    waves = cdiv(blocks, processors * (_WARPS // one.warps))
    most = cdiv(blocks, processors) * (one.warps // one.slices) * units
    rounds = cdiv(cdiv(units, one.slices), one.depth)
    reading = max(groups * tiles * units / processors * _UNIT_CYCLES, most * _QUICKEST)
    waiting = waves * rounds * _LATENCY
    # Who waits less has more on its way, even where reading takes longer.
    return max(reading, waiting) + waiting / 8 + waves * _ADDING * (one.slices.bit_length() - 1)


def form_of(launch: Launcher, numbers: torch.Tensor) -> int:
    """FORM in the source."""
    if numbers.dtype is not torch.uint8:
        return 3
    if launch.capability in _TAKES_CODES:
        return 0
    return 1 if has_fp8(launch) else 2


def product(
    launch: Launcher,
    sizes: Sizes,
    weight: Weight,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    dtype: torch.dtype,
    made: Arrangement | None = None,
    place: int = 0,
) -> torch.Tensor:
    """y [T, G * O] in `dtype` of up to 16 rows x [T, G * I]. `made` for experiments, `place` as of
    `arrangement`, here and below."""
    rows, numbers = len(x), weight.numbers_POI
    y = x.new_empty((rows, sizes.groups * sizes.rows), dtype=dtype)
    x = _copied_by_16_bytes(x)
    if x_scales is not None:
        x_scales = _read_by_4_bytes(x_scales)
    units = sizes.columns * numbers.element_size() // _UNIT
    tiles = sizes.rows // _TILE
    times_8 = 1 if rows <= 8 else 2
    depth = 3 if times_8 == 1 and sizes.group != _NARROW else 2
    made = made or arrangement(
        sizes.groups, tiles, len(numbers) * units, launch.multiprocessors, depth, place
    )
    launch.cuda(
        KERNELS[made.warps],
        (cdiv(tiles, made.warps // made.slices) if rows else 0, sizes.groups, 1),
        x,
        x_scales,
        numbers,
        weight.scales_BB,
        y,
        rows,
        sizes.rows,
        units,
        made.slices.bit_length() - 1,
        x.stride(0) * x.element_size(),
        0 if x_scales is None else x_scales.stride(0),
        0 if weight.scales_BB is None else weight.scales_BB.stride(0),
        shared_bytes=made.warps * 8 * times_8 * _PADDED * 4,
        FORM=form_of(launch, numbers),
        NT=times_8,
        WARPS=made.warps,
        DEPTH=made.depth,
        PARTS=len(numbers),
        WEIGHT_SCALE=_scale_format(weight.scales_BB),
        ROW_SCALE=_scale_format(x_scales),
        BLOCK_O=sizes.block[0],
        BLOCK_I=sizes.block[1],
        GROUP=sizes.group if x_scales is not None else _UNIT,
        WIDE=int(dtype is torch.float32),
    )
    return y


def _copied_by_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Rows as they are where each lies dense and begins at a multiple of 16 bytes, or a copy."""
    begins = x.is_meta or x.data_ptr() % 16 == 0
    if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and begins:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _read_by_4_bytes(scales: torch.Tensor) -> torch.Tensor:
    """As `_copied_by_16_bytes`."""
    begins = scales.is_meta or scales.data_ptr() % 4 == 0
    if scales.stride(1) == 1 and scales.stride(0) * scales.element_size() % 4 == 0 and begins:
        return scales
    groups = scales.shape[1]
    padded = scales.new_empty(len(scales), groups + -groups % 4)
    padded[:, :groups] = scales
    return padded[:, :groups]


def _scale_format(scales: torch.Tensor | None) -> int:
    if scales is None:
        return 0
    return 1 if scales.dtype is torch.uint8 else 2


def has_cublas(launch: Launcher) -> bool:
    """Whether torch's own products are those of the GPU that `launch` is for."""
    return not launch.portable


def is_served(case: CodesCase, weight: Weight, rows: int) -> bool:
    """Whether this kernel does a call. It takes narrow blocks with scales of one byte alone."""
    assert weight.scales_BB is not None
    bytes_alone = case.group != _NARROW or weight.scales_BB.dtype is torch.uint8
    return rows <= FEW_ROWS and bytes_alone


def scales_blocks(launch: Launcher) -> bool:
    """Whether cuBLAS has products of codes with scales."""
    return launch.capability == _HOPPER.capability and has_cublas(launch)


def prepare_codes(
    case: CodesCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor
) -> Weight | Scaled:
    """With the scales that cuBLAS wants, where it may do many rows."""
    if scaled.whole_blocks(case, _HOPPER):
        return scaled.prepare(case, codes_OI, scale_BB)
    return linear.prepare_codes(case, codes_OI, scale_BB)


def fp8_rows(
    launch: Launcher,
    case: Fp8RowsCase,
    weight: Weight | Scaled,
    codes_TI: torch.Tensor,
    scales_TG: torch.Tensor,
    made: Arrangement | None = None,
    place: int = 0,
) -> torch.Tensor:
    kept = _plain(weight)
    if is_served(case, kept, len(codes_TI)):
        sizes = Sizes(1, case.rows, case.columns, case.block, case.group)
        dtype = TORCH_DTYPES[case.dtype]
        return product(launch, sizes, kept, codes_TI, scales_TG, dtype, made, place)
    if isinstance(weight, Scaled) and scales_blocks(launch):
        return scaled.fp8_rows(launch, case, weight, codes_TI, scales_TG)
    return linear.fp8_rows(launch, case, kept, codes_TI, scales_TG)


def grouped_fp8_rows(
    launch: Launcher,
    case: GroupedFp8RowsCase,
    weight: Weight | Scaled,
    codes_TI: torch.Tensor,
    scales_TG: torch.Tensor,
    made: Arrangement | None = None,
    place: int = 0,
) -> torch.Tensor:
    kept = _plain(weight)
    if is_served(case, kept, len(codes_TI)):
        sizes = Sizes(case.groups, case.rows, case.columns, case.block, case.group)
        dtype = TORCH_DTYPES[case.dtype]
        return product(launch, sizes, kept, codes_TI, scales_TG, dtype, made, place)
    if isinstance(weight, Scaled) and scales_blocks(launch):
        return scaled.grouped_fp8_rows(launch, case, weight, codes_TI, scales_TG)
    return linear.grouped_fp8_rows(launch, case, kept, codes_TI, scales_TG)


def grouped(
    launch: Launcher,
    case: GroupedCase,
    weight: Weight,
    x_TGI: torch.Tensor,
    made: Arrangement | None = None,
    place: int = 0,
) -> torch.Tensor:
    if len(x_TGI) > FEW_ROWS:
        return linear.grouped(launch, case, weight, x_TGI)
    sizes = Sizes(case.groups, case.rows, case.columns)
    dtype = TORCH_DTYPES[case.dtype]
    return product(launch, sizes, weight, x_TGI.flatten(1), None, dtype, made, place)


def dense(
    launch: Launcher,
    case: DenseCase,
    weight: Weight,
    x_TI: torch.Tensor,
    made: Arrangement | None = None,
    place: int = 0,
) -> torch.Tensor:
    if len(x_TI) <= FEW_ROWS:
        sizes = Sizes(1, case.rows, case.columns)
        dtype = TORCH_DTYPES[case.out_dtype]
        return product(launch, sizes, weight, x_TI, None, dtype, made, place)
    if has_cublas(launch):
        return torch_dense.dense(launch, case, weight, x_TI)
    return linear.dense(launch, case, weight, x_TI)


def codes_eligible(case: CodesCase, target: Target) -> Verdict:
    """Whole tiles of rows; groups of 128 columns, or of 32 with blocks of 32 x 32."""
    wide = case.group == _UNIT and case.block[1] % _UNIT == 0 and case.block[0] % _TILE == 0
    narrow = case.group == _NARROW and case.block == (_NARROW, _NARROW) and case.scale == "e8m0"
    if not (wide or narrow):
        return no(f"takes no groups of {case.group} columns with blocks of {case.block}")
    return _eligible(case.rows, case.columns, _UNIT, target)


def dense_eligible(case: DenseCase, target: Target) -> Verdict:
    if case.dtype != "bfloat16":
        return no(f"multiplies rows in bfloat16, not in {case.dtype}")
    return _eligible(case.rows, case.columns, _UNIT // 2, target)


def grouped_eligible(case: GroupedCase, target: Target) -> Verdict:
    if case.weight_format != "dense" or case.dtype != "bfloat16":
        return no(f"multiplies numbers in bfloat16, not {case.weight_format} in {case.dtype}")
    return _eligible(case.rows, case.columns, _UNIT // 2, target)


def _eligible(rows: int, columns: int, step: int, target: Target) -> Verdict:
    if rows % _TILE or columns % step:
        return no(f"{rows} x {columns} are not whole tiles of {_TILE} x {step}")
    verdict = on_gpu(None, target)
    library = compiler()
    return no(library) if verdict and isinstance(library, str) else verdict


def _others(run: Callable[..., torch.Tensor]) -> dict[str, Variant]:
    """The next best arrangements on paper."""
    places = ("second", 1), ("third", 2)
    return {name: Variant(partial(_at, run, place), FEW_ROWS) for name, place in places}


def _at(run: Callable[..., torch.Tensor], place: int, *arguments: Any) -> torch.Tensor:
    return run(*arguments, place=place)


def _plain(held: Weight | Scaled) -> Weight:
    return held.weight if isinstance(held, Scaled) else held


_HOLDS = {TRITON: _plain, TORCH: lambda held: held}

BACKENDS = (
    Declared(
        "linear.fp8_rows", fp8_rows, codes_eligible, prepare_codes, NAME, _HOLDS, _others(fp8_rows)
    ),
    Declared(
        "linear.grouped_fp8_rows",
        grouped_fp8_rows,
        codes_eligible,
        prepare_codes,
        NAME,
        _HOLDS,
        _others(grouped_fp8_rows),
    ),
    Declared(
        "linear.grouped",
        grouped,
        grouped_eligible,
        linear.prepare_grouped,
        NAME,
        variants=_others(grouped),
    ),
    Declared(
        "linear.dense",
        dense,
        dense_eligible,
        linear.prepare_dense,
        NAME,
        variants=_others(dense),
    ),
)
