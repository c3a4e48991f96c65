"""Stored tensors: how checkpoints keep a matrix in each of the formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from metainfer.arch.record import Quantisation, WeightFormat
from metainfer.core.dtypes import DType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor. FP4 matrices are I8 [out, in / 2]: two codes a byte."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size_bytes


def matrix(
    quantisation: Quantisation, prefix: str, weight_format: WeightFormat, rows: int, columns: int
) -> Iterator[TensorSpec]:
    """A linear layer's weight [rows, columns] in its stored format."""
    match weight_format:
        case WeightFormat.F32:
            yield TensorSpec(f"{prefix}.weight", DType.F32, (rows, columns))
        case WeightFormat.BF16:
            yield TensorSpec(f"{prefix}.weight", DType.BF16, (rows, columns))
        case WeightFormat.FP8_BLOCK:
            block_rows, block_columns = quantisation.fp8_block
            shape = (-(-rows // block_rows), -(-columns // block_columns))
            yield TensorSpec(f"{prefix}.weight", DType.F8_E4M3, (rows, columns))
            yield TensorSpec(f"{prefix}.scale", quantisation.fp8_scale_dtype, shape)
        case WeightFormat.FP4_GROUP:
            groups = columns // quantisation.fp4_group
            yield TensorSpec(f"{prefix}.weight", DType.I8, (rows, columns // 2))
            yield TensorSpec(f"{prefix}.scale", DType.F8_E8M0, (rows, groups))
        case WeightFormat.NVFP4:
            groups = columns // NVFP4_GROUP
            yield TensorSpec(f"{prefix}.weight", DType.I8, (rows, columns // 2))
            yield TensorSpec(f"{prefix}.scale", DType.F8_E4M3, (rows, groups))
            yield TensorSpec(f"{prefix}.global_scale", DType.F32, (1,))


NVFP4_GROUP = 16
"""Columns that share a scale of NVFP4."""


def linear(
    quantisation: Quantisation, prefix: str, rows: int, columns: int
) -> Iterator[TensorSpec]:
    """`matrix` in the format of linear layers."""
    return matrix(quantisation, prefix, quantisation.linear, rows, columns)
