"""Products with weights: quantised ones are unpacked in tiles of rows that stay in the cache."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from metainfer.kernels.cpu.backend import cpu_backend, expanded_backend
from metainfer.kernels.cpu.product import product
from metainfer.kernels.cpu.tiles import is_one_tile, row_tiles
from metainfer.kernels.cpu.unpack import Fp8Weight, fp8_weight
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.ops.linear import DenseCase, Fp8BlockCase, GroupedCase

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
    block_codes = case.block[0] * case.columns
    if is_one_tile(len(weight.factor), block_codes):
        y_TO = _fp8_rows(weight, x_TI)
    else:
        tiles = row_tiles(len(weight.factor), block_codes)
        y_TO = torch.cat([_fp8_rows(weight.of(tile), x_TI) for tile in tiles], dim=1)
    return y_TO if y_TO.shape[1] == case.rows else y_TO[:, : case.rows].contiguous()


def _fp8_rows(weight: Fp8Weight, x_TI: torch.Tensor) -> torch.Tensor:
    """The products with whole blocks of rows, in the case's dtype."""
    if len(x_TI) > _FEW_ROWS:
        return product(x_TI, weight.unpack().to(x_TI.dtype))
    y_BTO = torch.bmm(x_TI * weight.factor, weight.unscaled().transpose(1, 2))
    return y_BTO.transpose(0, 1).flatten(1).to(x_TI.dtype)


def prepare_expanded(
    case: Fp8BlockCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor
) -> torch.Tensor:
    return to_float("fp8_block", (codes_OI, scale_BB), case.block).to(TORCH_DTYPES[case.dtype])


def expanded(case: Fp8BlockCase, weight_OI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    return product(x_TI, weight_OI) if len(x_TI) > _FEW_ROWS else linear(x_TI, weight_OI)


def prepare_grouped(case: GroupedCase, *weights: torch.Tensor) -> Fp8Weight | torch.Tensor:
    if case.weight_format == "fp8_block":
        return fp8_weight(weights[0], weights[1], case.block)
    return prepare_grouped_expanded(case, *weights)


def prepare_grouped_expanded(case: GroupedCase, *weights: torch.Tensor) -> torch.Tensor:
    return to_float(case.weight_format, weights, case.block).to(TORCH_DTYPES[case.dtype])


def grouped(
    case: GroupedCase, weight: Fp8Weight | torch.Tensor, x_TGI: torch.Tensor
) -> torch.Tensor:
    rows = len(x_TGI)
    if isinstance(weight, torch.Tensor):
        weight_GLI = weight.unflatten(0, (case.groups, case.rows))
    elif rows <= _FEW_ROWS and case.rows % case.block[0] == 0:
        return _grouped_few(case, weight, x_TGI)
    else:
        weight_OI = weight.unpack()[: case.groups * case.rows].to(x_TGI.dtype)
        weight_GLI = weight_OI.unflatten(0, (case.groups, case.rows))
    y_GTL = torch.bmm(x_TGI.transpose(0, 1), weight_GLI.transpose(1, 2))
    return y_GTL.transpose(0, 1).reshape(rows, case.groups * case.rows)


def _grouped_few(case: GroupedCase, weight: Fp8Weight, x_TGI: torch.Tensor) -> torch.Tensor:
    """As `_fp8_rows`: each block of rows belongs to one group."""
    x_GTI = x_TGI.transpose(0, 1)
    x_BTI = x_GTI.repeat_interleave(case.rows // case.block[0], 0) * weight.factor
    y_BTO = torch.bmm(x_BTI, weight.unscaled().transpose(1, 2))
    return y_BTO.transpose(0, 1).flatten(1).to(x_TGI.dtype)


BACKENDS = (
    cpu_backend("linear.dense", dense, prepare_dense),
    cpu_backend("linear.fp8_block", fp8_block, prepare_fp8_block),
    expanded_backend("linear.fp8_block", expanded, prepare_expanded),
    cpu_backend("linear.grouped", grouped, prepare_grouped),
    expanded_backend("linear.grouped", grouped, prepare_grouped_expanded),
)
