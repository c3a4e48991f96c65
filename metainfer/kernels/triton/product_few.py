"""Device code of products of few rows with weights, which are bound by reading the weight.

The weight is cut into tiles of BN rows and SPLITS slices of its columns, a program each, so that
enough of it is on its way at any time. The weight is the left side of the product: matrix units
take 64 rows there and no fewer. Sums of slices go through memory; whichever program of a tile ends
last (a ticket tells it, TICKETS) or a second launch adds them in their order: results never depend
on who was first.

Shape suffixes: N rows of a tile of the weight, M rows of x, K columns of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.product_operands import factor_of, operand, scale_of, step_scales
from metainfer.kernels.triton.rows import rounded


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["x_scales"])
def few_products(  # noqa: PLR0912, PLR0915 (formats tie all of it together)
    x, x_scales, weight, weight_scales, partials, tickets, y,
    T, outputs, columns, x_stride, x_scales_stride, weight_scales_stride, part_size,
    FORM: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, ONE_SCALE: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile of BN rows of a group's weight, slice, group).

    Args:
        x, x_scales, weight, weight_scales, y, part_size, ONE_SCALE, EVEN: as of `tall_products`;
            T is BM at most.
        partials: fp32 [SPLITS, T, groups * outputs]; None for one slice.
        tickets: int32, zero before and after, one a tile; None where partials are added by
            `add_partials`.
    """
    tile, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = tl.num_programs(2) * outputs
    t_M, k_K = tl.arange(0, BM), tl.arange(0, BK)
    out_N = tile * BN + tl.arange(0, BN)
    # Rows that are not there are others' again: nothing of them is stored.
    at_M = tl.minimum(t_M, T - 1).to(tl.int64)
    at_N = group.to(tl.int64) * outputs + tl.minimum(out_N, outputs - 1)
    x_at_MK = x + at_M[:, None] * x_stride + group * columns + k_K[None, :]
    weight_at_NK = weight + at_N[:, None] * columns + k_K[None, :]
    steps = tl.cdiv(columns, BK)
    share = tl.cdiv(PARTS * steps, SPLITS)
    first, last = split * share, tl.minimum((split + 1) * share, PARTS * steps)
    x_scale_at_M = None
    if x_scales is not None:
        x_scale_at_M = x_scales + (at_M * x_scales_stride + group * (columns // GROUP))
    if weight_scales is not None:
        if ONE_SCALE:
            block = (group * outputs + tile * BN) // BLOCK_O
            scale_at = weight_scales + block * weight_scales_stride
        else:
            scale_at = weight_scales + at_N // BLOCK_O * weight_scales_stride
        ahead_M, ahead_N = step_scales(
            x_scale_at_M, scale_at, tl.minimum(first, steps - 1) * BK, GROUP, BLOCK_I
        )
    acc_NM = tl.zeros([BN, BM], tl.float32)
    for n in range(first, last):
        step = n % steps * BK
        if EVEN:
            weight_NK = tl.load(weight_at_NK + (n // steps * part_size + step))
            x_MK = tl.load(x_at_MK + step)
        else:
            is_there_K = (step + k_K < columns)[None, :]
            part_at_NK = weight_at_NK + (n // steps * part_size + step)
            weight_NK = tl.load(part_at_NK, mask=is_there_K, other=0)
            x_MK = tl.load(x_at_MK + step, mask=is_there_K, other=0)
        weight_NK = operand(weight_NK, FORM, FP8, UPCAST)
        x_KM = tl.trans(operand(x_MK, FORM, FP8, UPCAST))
        if weight_scales is None:
            acc_NM = tl.dot(weight_NK, x_KM, acc_NM, input_precision="ieee")
        else:
            scale_M, scale_N = ahead_M, ahead_N
            following = tl.minimum(step + BK, (steps - 1) * BK)
            ahead_M, ahead_N = step_scales(x_scale_at_M, scale_at, following, GROUP, BLOCK_I)
            part_NM = tl.dot(weight_NK, x_KM, input_precision="ieee")
            factor = scale_of(scale_N) * factor_of(FORM)
            if not ONE_SCALE:
                factor = factor[:, None]
            if x_scales is not None:
                factor = factor * scale_of(scale_M)[None, :]
            acc_NM += part_NM * factor

    place_NM = t_M.to(tl.int64)[None, :] * width + (group * outputs + out_N)[:, None]
    is_there_NM = (out_N < outputs)[:, None] & (t_M < T)[None, :]
    if SPLITS == 1:
        tl.store(y + place_NM, rounded(acc_NM, y).to(y.dtype.element_ty), mask=is_there_NM)
    else:
        size = T.to(tl.int64) * width
        tl.store(partials + split * size + place_NM, acc_NM, mask=is_there_NM)
        if tickets is not None:
            tl.debug_barrier()  # all of the program is written before its ticket is
            ticket_at = tickets + group * tl.num_programs(0) + tile
            if tl.atomic_add(ticket_at, 1, sem="acq_rel") == SPLITS - 1:
                sum_NM = tl.zeros([BN, BM], tl.float32)
                for place in tl.static_range(SPLITS):
                    at_NM = partials + place * size + place_NM
                    sum_NM += tl.load(at_NM, mask=is_there_NM, other=0.0, cache_modifier=".cg")
                tl.store(y + place_NM, rounded(sum_NM, y).to(y.dtype.element_ty), mask=is_there_NM)
                tl.store(ticket_at, 0)


@triton.jit(do_not_specialize=["size"])
def add_partials(partials, y, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (BLOCK numbers of y): the sums of slices, in their order."""
    place_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there_B = place_B < size
    sum_B = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(SPLITS):
        sum_B += tl.load(partials + n * size + place_B, mask=is_there_B, other=0.0)
    tl.store(y + place_B, rounded(sum_B, y).to(y.dtype.element_ty), mask=is_there_B)
