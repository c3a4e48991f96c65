"""Products with weights in Triton."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.product import Sizes, Tile, Weight, product, weight_of
from metainfer.ops.base import Target
from metainfer.ops.linear import (
    DenseCase,
    Fp8BlockCase,
    Fp8RowsCase,
    GroupedCase,
    GroupedFp8RowsCase,
)

_NARROWEST = 16  # columns that matrix units multiply at a time


def prepare_dense(case: DenseCase, weight_OI: torch.Tensor) -> Weight:
    """An fp32 weight of exact products with bf16 rows becomes two bf16 parts, the nearest and the
    nearest of what is left: it is off by 2^-18 of itself at most."""
    return weight_of(dense_parts(case, weight_OI), None, (1, case.rows))


def dense_parts(case: DenseCase, weight_OI: torch.Tensor) -> torch.Tensor:
    """[P, O, I] in the format of the rows."""
    if case.dtype == "float32":
        return weight_OI.float().unsqueeze(0)
    near_OI = weight_OI.bfloat16()
    if weight_OI.dtype is torch.bfloat16 or case.out_dtype != "float32":
        return near_OI.unsqueeze(0)
    return torch.stack([near_OI, (weight_OI - near_OI.float()).bfloat16()])


def prepare_codes(
    case: Fp8BlockCase | Fp8RowsCase | GroupedFp8RowsCase,
    codes_OI: torch.Tensor,
    scale_BB: torch.Tensor,
) -> Weight:
    groups = case.groups if isinstance(case, GroupedFp8RowsCase) else 1
    codes_POI = codes_OI.contiguous().view(torch.uint8).unsqueeze(0)
    return weight_of(codes_POI, scale_BB.contiguous(), (groups, case.rows))


def prepare_grouped(case: GroupedCase, *weights: torch.Tensor) -> Weight:
    sizes = case.groups, case.rows
    if case.weight_format == "fp8_block":
        codes_POI = weights[0].contiguous().view(torch.uint8).unsqueeze(0)
        return weight_of(codes_POI, weights[1].contiguous(), sizes)
    return weight_of(weights[0].to(TORCH_DTYPES[case.dtype]).unsqueeze(0), None, sizes)


def dense(
    launch: Launcher,
    case: DenseCase,
    weight: Weight,
    x_TI: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`tile` for experiments, here and below."""
    sizes = Sizes(1, case.rows, case.columns)
    return product(launch, sizes, weight, x_TI, None, TORCH_DTYPES[case.out_dtype], tile)


def fp8_block(
    launch: Launcher,
    case: Fp8BlockCase,
    weight: Weight,
    x_TI: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    sizes = Sizes(1, case.rows, case.columns, case.block)
    return product(launch, sizes, weight, x_TI, None, TORCH_DTYPES[case.dtype], tile)


def grouped(
    launch: Launcher,
    case: GroupedCase,
    weight: Weight,
    x_TGI: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    sizes = Sizes(case.groups, case.rows, case.columns, case.block)
    return product(launch, sizes, weight, x_TGI.flatten(1), None, TORCH_DTYPES[case.dtype], tile)


def fp8_rows(
    launch: Launcher,
    case: Fp8RowsCase,
    weight: Weight,
    codes_TI: torch.Tensor,
    scales_TG: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    sizes = Sizes(1, case.rows, case.columns, case.block, case.group)
    return product(launch, sizes, weight, codes_TI, scales_TG, TORCH_DTYPES[case.dtype], tile)


def grouped_fp8_rows(
    launch: Launcher,
    case: GroupedFp8RowsCase,
    weight: Weight,
    codes_TI: torch.Tensor,
    scales_TG: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    sizes = Sizes(case.groups, case.rows, case.columns, case.block, case.group)
    return product(launch, sizes, weight, codes_TI, scales_TG, TORCH_DTYPES[case.dtype], tile)


def whole_steps(
    case: Fp8BlockCase | GroupedCase | Fp8RowsCase | GroupedFp8RowsCase, target: Target
) -> Verdict:
    """Serves groups and blocks whose columns are a power of two, 16 at least."""
    if not isinstance(case, GroupedCase) or case.weight_format == "fp8_block":
        for columns in (case.block[1], getattr(case, "group", case.block[1])):
            if columns < _NARROWEST or columns & (columns - 1):
                return no(f"multiplies 16, 32, 64 .. columns of a scale, not {columns}")
    if isinstance(case, GroupedFp8RowsCase) and case.columns % case.group:
        return no(f"groups of {case.group} do not fill {case.columns} columns")
    return on_gpu(case, target)


BACKENDS = (
    Declared("linear.dense", dense, prepare=prepare_dense),
    Declared("linear.fp8_block", fp8_block, whole_steps, prepare_codes),
    Declared("linear.grouped", grouped, whole_steps, prepare_grouped),
    Declared("linear.fp8_rows", fp8_rows, whole_steps, prepare_codes),
    Declared("linear.grouped_fp8_rows", grouped_fp8_rows, whole_steps, prepare_codes),
)
