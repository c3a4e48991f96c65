"""Products of rows in fp8 groups of 128 with weights in blocks of 128 x 128 by cuBLAS.

It wants scales in fp32 and turned: those of rows lie group by group, those of blocks column of
blocks by column, padded to four.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, scaled_mm

from metainfer.kernels.reference.dequantise import scales_to_float
from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.torch_products.dense import NAME
from metainfer.kernels.triton import linear
from metainfer.kernels.triton.backend import NAME as TRITON
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.product import FEW_ROWS, Weight
from metainfer.kernels.triton.product_scales import turned
from metainfer.ops.base import Target
from metainfer.ops.linear import Fp8RowsCase, GroupedFp8RowsCase

_SIDE = 128  # of blocks, and width of groups
_PADDED = 4  # rows of codes, and columns of blocks, are padded to a multiple
_HOPPER = (9, 0)


class Operands:
    """A weight as cuBLAS takes it, made once: six views take the host as long as a small product
    runs. They have no memory of their own, so this is no tuple, whose tensors are counted.

    Attributes:
        parts: of each group (codes e4m3 [I, O], scales fp32 [I / 128 padded, O / 128]).
    """

    def __init__(self, codes_OI: torch.Tensor, scales_BB: torch.Tensor, groups: int) -> None:
        codes = codes_OI.view(torch.float8_e4m3fn).chunk(groups)
        scales = scales_BB.chunk(groups)
        self.parts = [(own.T, kept.T) for own, kept in zip(codes, scales, strict=True)]


class Scaled(NamedTuple):
    """A weight for Triton's kernels, and fp32 scales [O / 128, I / 128 padded] for cuBLAS."""

    weight: Weight
    scales_BB: torch.Tensor
    operands: Operands


def prepare(
    case: Fp8RowsCase | GroupedFp8RowsCase, codes_OI: torch.Tensor, scale_BB: torch.Tensor
) -> Scaled:
    weight = linear.prepare_codes(case, codes_OI, scale_BB)
    scales_BB = scales_to_float(scale_BB)
    missing = -scales_BB.shape[1] % _PADDED
    scales_BB = torch.nn.functional.pad(scales_BB, (0, missing), value=1.0)
    groups = case.groups if isinstance(case, GroupedFp8RowsCase) else 1
    return Scaled(weight, scales_BB, Operands(weight.numbers_POI[0], scales_BB, groups))


def fp8_rows(
    launch: Launcher,
    case: Fp8RowsCase,
    weight: Scaled,
    codes_TI: torch.Tensor,
    scales_TG: torch.Tensor,
) -> torch.Tensor:
    if len(codes_TI) <= FEW_ROWS:
        return linear.fp8_rows(launch, case, weight.weight, codes_TI, scales_TG)
    x = _padded(launch, codes_TI, scales_TG)
    return _product(*x, *weight.operands.parts[0])[: len(scales_TG)]


def grouped_fp8_rows(
    launch: Launcher,
    case: GroupedFp8RowsCase,
    weight: Scaled,
    codes_TI: torch.Tensor,
    scales_TG: torch.Tensor,
) -> torch.Tensor:
    rows = len(codes_TI)
    if rows <= FEW_ROWS:
        return linear.grouped_fp8_rows(launch, case, weight.weight, codes_TI, scales_TG)
    codes_TI, scales_TG = _padded(launch, codes_TI, scales_TG)
    products = [
        _product(codes, scales, *part)[:rows]
        for codes, scales, part in zip(
            codes_TI.chunk(case.groups, 1),
            scales_TG.chunk(case.groups, 1),
            weight.operands.parts,
            strict=True,
        )
    ]
    return torch.cat(products, dim=1)


def _padded(
    launch: Launcher, codes_TI: torch.Tensor, scales_TG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes as e4m3 with rows of zeros up to a multiple of four, their scales as fp32, those of
    a group of channels side by side)."""
    padded = len(codes_TI) + -len(codes_TI) % _PADDED
    turned_GT = turned(launch, scales_TG, padded)
    if padded > len(codes_TI) or codes_TI.stride(1) != 1 or codes_TI.stride(0) % 16:
        longer_TI = codes_TI.new_empty((padded, codes_TI.shape[1]))
        longer_TI[: len(codes_TI)] = codes_TI
        longer_TI[len(codes_TI) :] = 0
        codes_TI = longer_TI
    return codes_TI.view(torch.float8_e4m3fn), turned_GT.T


def _product(
    codes_TI: torch.Tensor, scales_TG: torch.Tensor, codes_IO: torch.Tensor, scales_BB: torch.Tensor
) -> torch.Tensor:
    """bf16 [T, O]."""
    return scaled_mm(
        codes_TI,
        codes_IO,
        scales_TG,
        ScalingType.BlockWise1x128,
        scales_BB,
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def whole_blocks(case: Fp8RowsCase | GroupedFp8RowsCase, target: Target) -> Verdict:
    """Serves Hopper, which alone has these products in cuBLAS, and whole blocks."""
    if target.type != "cuda" or target.capability != _HOPPER:
        return no("cuBLAS scales blocks of 128 x 128 on sm_90 alone")
    if case.block != (_SIDE, _SIDE) or case.group != _SIDE:
        return no(f"cuBLAS scales blocks of 128 x 128, not of {case.block[0]} x {case.block[1]}")
    if case.rows % _SIDE or case.columns % _SIDE:
        return no(f"{case.rows} x {case.columns} are not whole blocks of 128 x 128")
    if case.dtype != "bfloat16":
        return no("results of scaled products are bf16")
    return on_gpu(case, target)


_HOLDS = {TRITON: lambda held: held.weight}

BACKENDS = (
    Declared("linear.fp8_rows", fp8_rows, whole_blocks, prepare, NAME, _HOLDS),
    Declared("linear.grouped_fp8_rows", grouped_fp8_rows, whole_blocks, prepare, NAME, _HOLDS),
)
