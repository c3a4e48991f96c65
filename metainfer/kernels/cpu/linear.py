"""Products with weights: quantised ones are unpacked in tiles of rows that stay in the cache."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from metainfer.kernels.cpu.backend import cpu_backend, expanded_backend
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.cpu.unpack import Fp8Weight, fp8_weight
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.ops.linear import DenseCase, Fp8BlockCase, GroupedCase

_TILE_CODES = 2**20


def prepare_dense(case: DenseCase, weight_OI: torch.Tensor) -> torch.Tensor:
    return weight_OI.to(_product_dtype(case))


def dense(case: DenseCase, weight_OI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    return linear(x_TI.to(weight_OI.dtype), weight_OI).to(TORCH_DTYPES[case.out_dtype])


def _product_dtype(case: DenseCase) -> torch.dtype:
    """fp32 where operands or result are: a bf16 product would round the result."""
    return torch.float32 if "float32" in (case.dtype, case.out_dtype) else torch.bfloat16


def prepare_fp8_block(
    case: Fp8BlockCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor
) -> Fp8Weight:
    return fp8_weight(codes_OI, scale_BB, case.block, TORCH_DTYPES[case.dtype])


def fp8_block(case: Fp8BlockCase, weight: Fp8Weight, x_TI: torch.Tensor) -> torch.Tensor:
    dtype, block_rows = TORCH_DTYPES[case.dtype], case.block[0]
    tiles = list(row_tiles(len(weight.factors[0]), block_rows * case.columns, _TILE_CODES))
    if len(tiles) == 1:
        return linear(x_TI, weight.unpack(dtype)[: case.rows])
    y_TO = torch.empty(len(x_TI), case.rows, dtype=dtype)
    for tile in tiles:
        rows = slice(tile.start * block_rows, min(tile.stop * block_rows, case.rows))
        weight_oI = weight.blocks(tile).unpack(dtype)[: rows.stop - rows.start]
        y_TO[:, rows] = linear(x_TI, weight_oI)
    return y_TO


def prepare_expanded(
    case: Fp8BlockCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor
) -> torch.Tensor:
    return to_float("fp8_block", (codes_OI, scale_BB), case.block).to(TORCH_DTYPES[case.dtype])


def expanded(case: Fp8BlockCase, weight_OI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    return linear(x_TI, weight_OI)


def prepare_grouped(case: GroupedCase, *weights: torch.Tensor) -> Fp8Weight | torch.Tensor:
    if case.weight_format == "fp8_block":
        return fp8_weight(weights[0], weights[1], case.block, TORCH_DTYPES[case.dtype])
    return prepare_grouped_expanded(case, *weights)


def prepare_grouped_expanded(case: GroupedCase, *weights: torch.Tensor) -> torch.Tensor:
    return to_float(case.weight_format, weights, case.block).to(TORCH_DTYPES[case.dtype])


def grouped(
    case: GroupedCase, weight: Fp8Weight | torch.Tensor, x_TGI: torch.Tensor
) -> torch.Tensor:
    outputs, dtype = case.groups * case.rows, TORCH_DTYPES[case.dtype]
    weight_OI = weight.unpack(dtype) if isinstance(weight, Fp8Weight) else weight
    weight_GLI = weight_OI[:outputs].unflatten(0, (case.groups, case.rows))
    y_TO = torch.empty(len(x_TGI), outputs, dtype=dtype)
    y_TGL = y_TO.unflatten(1, (case.groups, case.rows))
    y_TGL.copy_(torch.bmm(x_TGI.transpose(0, 1), weight_GLI.transpose(1, 2)).transpose(0, 1))
    return y_TO


BACKENDS = (
    cpu_backend("linear.dense", dense, prepare_dense),
    cpu_backend("linear.fp8_block", fp8_block, prepare_fp8_block),
    expanded_backend("linear.fp8_block", expanded, prepare_expanded),
    cpu_backend("linear.grouped", grouped, prepare_grouped),
    expanded_backend("linear.grouped", grouped, prepare_grouped_expanded),
)
