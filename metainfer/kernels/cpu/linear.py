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

# Codes that are unpacked at a time: 2 MB of fp32.
_TILE_CODES = 2**19
# Products with so few rows cost less than unpacking does: there the scales go to the rows.
_FEW_ROWS = 16


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
    return fp8_weight(codes_OI, scale_BB, case.block)


def fp8_block(case: Fp8BlockCase, weight: Fp8Weight, x_TI: torch.Tensor) -> torch.Tensor:
    tiles = list(row_tiles(len(weight.factor), case.block[0] * case.columns, _TILE_CODES))
    if len(tiles) == 1:
        return _fp8_rows(case, weight, x_TI)[:, : case.rows]
    parts = [_fp8_rows(case, weight.blocks(tile), x_TI) for tile in tiles]
    return torch.cat(parts, dim=1)[:, : case.rows]


def _fp8_rows(case: Fp8BlockCase, weight: Fp8Weight, x_TI: torch.Tensor) -> torch.Tensor:
    """The products with whole blocks of rows, in the case's dtype."""
    if len(x_TI) > _FEW_ROWS:
        return linear(x_TI, weight.unpack().to(x_TI.dtype))
    scaled_BTI = x_TI.float() * weight.factor
    y_BTO = torch.bmm(scaled_BTI, weight.unscaled().transpose(1, 2))
    return y_BTO.transpose(0, 1).flatten(1).to(x_TI.dtype)


def prepare_expanded(
    case: Fp8BlockCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor
) -> torch.Tensor:
    return to_float("fp8_block", (codes_OI, scale_BB), case.block).to(TORCH_DTYPES[case.dtype])


def expanded(case: Fp8BlockCase, weight_OI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    return linear(x_TI, weight_OI)


def prepare_grouped(case: GroupedCase, *weights: torch.Tensor) -> Fp8Weight | torch.Tensor:
    if case.weight_format == "fp8_block":
        return fp8_weight(weights[0], weights[1], case.block)
    return prepare_grouped_expanded(case, *weights)


def prepare_grouped_expanded(case: GroupedCase, *weights: torch.Tensor) -> torch.Tensor:
    return to_float(case.weight_format, weights, case.block).to(TORCH_DTYPES[case.dtype])


def grouped(
    case: GroupedCase, weight: Fp8Weight | torch.Tensor, x_TGI: torch.Tensor
) -> torch.Tensor:
    weight_OI = weight.unpack() if isinstance(weight, Fp8Weight) else weight
    if len(x_TGI) > _FEW_ROWS:
        weight_OI = weight_OI.to(x_TGI.dtype)
    outputs = case.groups * case.rows
    weight_GLI = weight_OI[:outputs].unflatten(0, (case.groups, case.rows))
    x_GTI = x_TGI.transpose(0, 1).to(weight_OI.dtype)
    y_GTL = torch.bmm(x_GTI, weight_GLI.transpose(1, 2))
    return y_GTL.transpose(0, 1).to(x_TGI.dtype).reshape(len(x_TGI), outputs)


BACKENDS = (
    cpu_backend("linear.dense", dense, prepare_dense),
    cpu_backend("linear.fp8_block", fp8_block, prepare_fp8_block),
    expanded_backend("linear.fp8_block", expanded, prepare_expanded),
    cpu_backend("linear.grouped", grouped, prepare_grouped),
    expanded_backend("linear.grouped", grouped, prepare_grouped_expanded),
)
