"""Products with weights that were unpacked when they were loaded; rows are plain numbers."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import COMPOSED
from metainfer.ops.linear import DenseCase, Fp8BlockCase, GroupedCase


def prepare_dense(case: DenseCase, weight_OI: torch.Tensor) -> torch.Tensor:
    return weight_OI.to(TORCH_DTYPES[case.dtype])


def dense(case: DenseCase, weight_OI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    return linear(x_TI, weight_OI).to(TORCH_DTYPES[case.out_dtype])


def prepare_fp8(case: Fp8BlockCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor) -> torch.Tensor:
    return to_float("fp8_block", (codes_OI, scale_BB), case.block).to(TORCH_DTYPES[case.dtype])


def fp8_block(case: Fp8BlockCase, weight_OI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    return linear(x_TI, weight_OI)


def prepare_grouped(case: GroupedCase, *weights: torch.Tensor) -> torch.Tensor:
    weight_OI = to_float(case.weight_format, weights, case.block).to(TORCH_DTYPES[case.dtype])
    return weight_OI.unflatten(0, (case.groups, case.rows))


def grouped(case: GroupedCase, weight_GLI: torch.Tensor, x_TGI: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tgi,gli->tgl", x_TGI, weight_GLI).flatten(1)


BACKENDS = (
    Backend("linear.dense", COMPOSED, dense, prepare=prepare_dense),
    Backend("linear.fp8_block", COMPOSED, fp8_block, prepare=prepare_fp8, expands=True),
    Backend("linear.grouped", COMPOSED, grouped, prepare=prepare_grouped, expands=True),
)
