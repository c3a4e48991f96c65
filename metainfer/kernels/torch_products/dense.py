"""Products of plain numbers by cuBLAS."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton import linear
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.product import FEW_ROWS, Weight
from metainfer.ops.linear import DenseCase

NAME = "torch"


def dense(launch: Launcher, case: DenseCase, weight: Weight, x_TI: torch.Tensor) -> torch.Tensor:
    """A weight in two parts takes two products, added in fp32."""
    if len(x_TI) <= FEW_ROWS:
        return linear.dense(launch, case, weight, x_TI)
    y_TO, *others = (_product(case, x_TI, part_OI) for part_OI in weight.numbers_POI)
    for other_TO in others:
        y_TO += other_TO
    return y_TO


def _product(case: DenseCase, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    if case.dtype == case.out_dtype:
        return torch.mm(x_TI, weight_OI.T)
    return torch.mm(x_TI, weight_OI.T, out_dtype=TORCH_DTYPES[case.out_dtype])


BACKENDS = (Declared("linear.dense", dense, prepare=linear.prepare_dense, name=NAME),)
