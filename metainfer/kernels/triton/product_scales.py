"""Scales of rows as products of libraries want them: fp32, group by group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.launch import Launcher, cdiv
from metainfer.kernels.triton.product_operands import scale_of


@triton.jit(do_not_specialize=["T", "padded"], do_not_specialize_on_alignment=["scales"])
def _turned_scales(scales, turned, T, groups, stride, padded, BT: tl.constexpr, BG: tl.constexpr):
    """Program (BT rows): fp32 [groups, padded] from scales [T, groups]; 1 for rows of padding."""
    row_T = tl.program_id(0) * BT + tl.arange(0, BT)
    group_G = tl.program_id(1) * BG + tl.arange(0, BG)
    is_group_G = (group_G < groups)[:, None]
    at_GT = scales + row_T.to(tl.int64)[None, :] * stride + group_G[:, None]
    scale_GT = scale_of(tl.load(at_GT, mask=is_group_G & (row_T < T)[None, :], other=0))
    scale_GT = tl.where((row_T < T)[None, :], scale_GT, 1.0)
    to_GT = turned + group_G.to(tl.int64)[:, None] * padded + row_T[None, :]
    tl.store(to_GT, scale_GT, mask=is_group_G & (row_T < padded)[None, :])


def turned(launch: Launcher, scales_TG: torch.Tensor, padded: int) -> torch.Tensor:
    """fp32 [G, T padded]."""
    rows, groups = scales_TG.shape
    turned_GT = scales_TG.new_empty((groups, padded), dtype=torch.float32)
    launch(
        _turned_scales,
        (cdiv(padded, 128), cdiv(groups, 16)),
        scales_TG,
        turned_GT,
        rows,
        groups,
        scales_TG.stride(0),
        padded,
        BT=128,
        BG=16,
    )
    return turned_GT
