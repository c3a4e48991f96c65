"""Matrix products with weights, plainly: everything in fp32, rounded at the end."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dequantise import fp8_block, scales_to_float, to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.formats import decode_e4m3
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.linear import (
    DenseCase,
    Fp8BlockCase,
    Fp8RowsCase,
    GroupedCase,
    GroupedFp8RowsCase,
)

Tensors = tuple[torch.Tensor, ...]


def dense(case: DenseCase, weights: Tensors, x_TI: torch.Tensor) -> torch.Tensor:
    return (x_TI.float() @ weights[0].float().T).to(TORCH_DTYPES[case.out_dtype])


def fp8_block_linear(case: Fp8BlockCase, weights: Tensors, x_TI: torch.Tensor) -> torch.Tensor:
    weight_OI = fp8_block(weights[0], weights[1], case.block)
    return (x_TI.float() @ weight_OI.T).to(TORCH_DTYPES[case.dtype])


def grouped(case: GroupedCase, weights: Tensors, x_TGI: torch.Tensor) -> torch.Tensor:
    weight_GLI = to_float(case.weight_format, weights, case.block).unflatten(0, (case.groups, -1))
    out_TGL = torch.einsum("tgi,gli->tgl", x_TGI.float(), weight_GLI)
    return out_TGL.flatten(1).to(TORCH_DTYPES[case.dtype])


def _rows(codes_TI: torch.Tensor, scales_TG: torch.Tensor, group: int) -> torch.Tensor:
    """Rows in fp8 groups -> fp32 [T, I]."""
    factor_TI = scales_to_float(scales_TG).repeat_interleave(group, 1)
    return decode_e4m3(codes_TI) * factor_TI[:, : codes_TI.shape[1]]


def fp8_rows(
    case: Fp8RowsCase, weights: Tensors, codes_TI: torch.Tensor, scales_TG: torch.Tensor
) -> torch.Tensor:
    x_TI = _rows(codes_TI, scales_TG, case.group)
    return (x_TI @ fp8_block(weights[0], weights[1], case.block).T).to(TORCH_DTYPES[case.dtype])


def grouped_fp8_rows(
    case: GroupedFp8RowsCase, weights: Tensors, codes_TI: torch.Tensor, scales_TG: torch.Tensor
) -> torch.Tensor:
    x_TGI = _rows(codes_TI, scales_TG, case.group).unflatten(1, (case.groups, -1))
    weight_GLI = fp8_block(weights[0], weights[1], case.block).unflatten(0, (case.groups, -1))
    out_TGL = torch.einsum("tgi,gli->tgl", x_TGI, weight_GLI)
    return out_TGL.flatten(1).to(TORCH_DTYPES[case.dtype])


BACKENDS = (
    Backend("linear.dense", REFERENCE, dense),
    Backend("linear.fp8_block", REFERENCE, fp8_block_linear),
    Backend("linear.grouped", REFERENCE, grouped),
    Backend("linear.fp8_rows", REFERENCE, fp8_rows),
    Backend("linear.grouped_fp8_rows", REFERENCE, grouped_fp8_rows),
)
