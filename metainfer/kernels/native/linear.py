"""Products of few rows with fp8 weights: each row of codes is unpacked once, into the cache."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu import linear as torch_linear
from metainfer.kernels.cpu.backend import on_cpu
from metainfer.kernels.cpu.unpack import Fp8Weight
from metainfer.kernels.native.backend import (
    FEW_ROWS,
    MOST_ELEMENTS,
    Native,
    is_bf16,
    require,
    small,
)
from metainfer.kernels.native.library import Library
from metainfer.kernels.registry import Backend, Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.linear import Fp8BlockCase, GroupedCase


def fp8_block(
    library: Library, case: Fp8BlockCase, weight: Fp8Weight, x_TI: torch.Tensor
) -> torch.Tensor:
    if len(x_TI) > FEW_ROWS or (x_TI.stride(1) != 1 and case.columns > 1):
        return torch_linear.fp8_block(case, weight, x_TI)
    y_TO = torch.empty(len(x_TI), case.rows, dtype=x_TI.dtype)
    blocks, block_rows, _ = weight.codes.shape
    require(
        library.fp8_rows(
            len(x_TI),
            blocks,
            block_rows,
            case.columns,
            case.rows,
            blocks,
            weight.codes.data_ptr(),
            weight.factor.data_ptr(),
            x_TI.data_ptr(),
            x_TI.stride(0),
            0,
            y_TO.data_ptr(),
            is_bf16(x_TI),
        )
    )
    return y_TO


def grouped(
    library: Library, case: GroupedCase, weight: Fp8Weight, x_TGI: torch.Tensor
) -> torch.Tensor:
    if len(x_TGI) > FEW_ROWS or not x_TGI.is_contiguous():
        return torch_linear.grouped(case, weight, x_TGI)
    rows = case.groups * case.rows
    y_TO = torch.empty(len(x_TGI), rows, dtype=x_TGI.dtype)
    blocks, block_rows, _ = weight.codes.shape
    require(
        library.fp8_rows(
            len(x_TGI),
            blocks,
            block_rows,
            case.columns,
            rows,
            case.rows // block_rows,
            weight.codes.data_ptr(),
            weight.factor.data_ptr(),
            x_TGI.data_ptr(),
            case.groups * case.columns,
            case.columns,
            y_TO.data_ptr(),
            is_bf16(x_TGI),
        )
    )
    return y_TO


def grouped_eligible(case: GroupedCase, target: Target) -> Verdict:
    if case.weight_format != "fp8_block":
        return no(f"multiplies with fp8 weights alone, not with {case.weight_format} ones")
    if case.rows % case.block[0]:
        return no(f"{case.rows} rows of a group do not fill blocks of {case.block[0]}")
    if case.groups * case.rows * case.columns > MOST_ELEMENTS:
        return no("so many elements are work for more than one thread")
    return on_cpu(case, target)


def backends(native: Native) -> tuple[Backend, ...]:
    return (
        native.backend(
            "linear.fp8_block",
            fp8_block,
            torch_linear.prepare_fp8_block,
            small(lambda case: case.rows * case.columns),
        ),
        native.backend("linear.grouped", grouped, torch_linear.prepare_grouped, grouped_eligible),
    )
