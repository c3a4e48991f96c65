"""Device code of products of many rows with weights.

A program computes a tile [BM, BN] of the results of one group. Codes are multiplied BK columns at a
time, which lie in one group of the row and one block of the weight; their sum is scaled in fp32 and
added to the results in fp32, so scales of any kind stay exact and sums within the matrix units
short.

Shape suffixes: M rows of a tile, N columns of results, K columns of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e4m3_to_float
from metainfer.kernels.triton.product_operands import factor_of, operand, scale_of, step_scales
from metainfer.kernels.triton.rows import rounded


@triton.jit
def _place(T, outputs, BM: tl.constexpr, BN: tl.constexpr, HIGH: tl.constexpr):
    """(row, column) of a tile: programs that run side by side share HIGH tiles of rows, so that
    both inputs are read from the L2."""
    pid = tl.program_id(0)
    down, across = tl.cdiv(T, BM), tl.cdiv(outputs, BN)
    strip = HIGH * across
    first = pid // strip * HIGH
    height = tl.minimum(down - first, HIGH)
    within = pid % strip
    return first + within % height, within // height


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["x_scales"])
def tall_products(
    x, x_scales, weight, weight_scales, y,
    T, outputs, columns, x_stride, x_scales_stride, weight_scales_stride, part_size,
    FORM: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, ONE_SCALE: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HIGH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile, group).

    Args:
        x: [T, groups * columns], x_stride apart.
        x_scales: [T, groups * columns / GROUP], x_scales_stride apart; None for plain numbers.
        weight: [PARTS, groups * outputs, columns], parts of `part_size` that add up to it.
        weight_scales: of blocks of BLOCK_O rows and BLOCK_I columns of the weight; None.
        y: [T, groups * outputs].
        ONE_SCALE: the rows of a tile of the weight lie in one block.
        EVEN: BK divides `columns`.
    """
    group, groups = tl.program_id(1), tl.num_programs(1)
    down, across = _place(T, outputs, BM, BN, HIGH)
    row_M = down * BM + tl.arange(0, BM)
    out_N = across * BN + tl.arange(0, BN)
    k_K = tl.arange(0, BK)
    # Rows that are not there are others' again: nothing of them is stored.
    at_M = tl.minimum(row_M, T - 1).to(tl.int64)
    at_N = group.to(tl.int64) * outputs + tl.minimum(out_N, outputs - 1)
    x_at_MK = x + at_M[:, None] * x_stride + group * columns + k_K[None, :]
    weight_at_NK = weight + at_N[:, None] * columns + k_K[None, :]
    x_scale_at_M = None
    if x_scales is not None:
        x_scale_at_M = x_scales + (at_M * x_scales_stride + group * (columns // GROUP))
    if weight_scales is not None:
        if ONE_SCALE:
            block = (group * outputs + across * BN) // BLOCK_O
            scale_at = weight_scales + block * weight_scales_stride
        else:
            scale_at = weight_scales + at_N // BLOCK_O * weight_scales_stride
        ahead_M, ahead_N = step_scales(x_scale_at_M, scale_at, 0, GROUP, BLOCK_I)
    acc_MN = tl.zeros([BM, BN], tl.float32)
    steps = tl.cdiv(columns, BK)
    for n in range(0, PARTS * steps):
        step = n % steps * BK
        if EVEN:
            x_MK = tl.load(x_at_MK + step)
            weight_NK = tl.load(weight_at_NK + (n // steps * part_size + step))
        else:
            is_there_K = (step + k_K < columns)[None, :]
            x_MK = tl.load(x_at_MK + step, mask=is_there_K, other=0)
            part_at_NK = weight_at_NK + (n // steps * part_size + step)
            weight_NK = tl.load(part_at_NK, mask=is_there_K, other=0)
        x_MK = operand(x_MK, FORM, FP8, UPCAST)
        weight_KN = tl.trans(operand(weight_NK, FORM, FP8, UPCAST))
        if weight_scales is None:
            acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
        else:
            scale_M, scale_N = ahead_M, ahead_N
            following = tl.minimum(step + BK, (steps - 1) * BK)
            ahead_M, ahead_N = step_scales(x_scale_at_M, scale_at, following, GROUP, BLOCK_I)
            part_MN = tl.dot(x_MK, weight_KN, input_precision="ieee")
            factor = scale_of(scale_N) * factor_of(FORM)
            if not ONE_SCALE:
                factor = factor[None, :]
            if x_scales is not None:
                factor = scale_of(scale_M)[:, None] * factor
            acc_MN += part_MN * factor
    to_MN = y + row_M.to(tl.int64)[:, None] * (groups * outputs) + group * outputs + out_N[None, :]
    is_there_MN = (row_M < T)[:, None] & (out_N < outputs)[None, :]
    tl.store(to_MN, rounded(acc_MN, y).to(y.dtype.element_ty), mask=is_there_MN)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["scales"])
def decoded_rows(
    codes, scales, numbers, rows, columns, stride, scales_stride,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, WIDTH columns): codes times the scales of their blocks, where there are
    any, as the type of `numbers` [rows, columns]."""
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k_W = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_there_RW = (row_R < rows)[:, None] & (k_W < columns)[None, :]
    codes_RW = tl.load(codes + row_R[:, None] * stride + k_W[None, :], mask=is_there_RW, other=0)
    number_RW = e4m3_to_float(codes_RW, FP8)
    if scales is not None:
        scale_at_RW = scales + (row_R // BLOCK_O * scales_stride)[:, None] + k_W[None, :] // BLOCK_I
        number_RW *= scale_of(tl.load(scale_at_RW, mask=is_there_RW, other=0))
    to_RW = numbers + row_R[:, None] * columns + k_W[None, :]
    kept_RW = rounded(number_RW, numbers).to(numbers.dtype.element_ty)
    tl.store(to_RW, kept_RW, mask=is_there_RW)
