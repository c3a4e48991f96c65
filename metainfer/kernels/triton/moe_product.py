"""Products of rows with the weights of their experts, in tiles of rows of one expert (`moe_order`).

One program has BM slots of an expert and BN rows of its weights: gate and up of the same channels,
whose activation it leaves, or down, whose products it leaves weighted, a row for each slot. Sums
over a group of columns are scaled in fp32 and added up (rows in codes, weights in blocks); where
no scale is left they are added up by the matrix instruction.

SWAP makes the weights the first operand, which may lie in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e4m3_groups, e4m3_to_float, e8m0_to_float
from metainfer.kernels.triton.moe_unpack import as_operand, unpacked_codes, unpacked_numbers
from metainfer.kernels.triton.rows import rounded, rounded_to_bf16


@triton.jit
def weight_tile(
    codes_ptr, scales_ptr, expert, n_N, ok_N, k,
    N: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, BK: tl.constexpr,
    OPERAND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of the rows n_N of an expert from column k on, as operands."""
    EVEN: tl.constexpr = C % BK == 0
    if FORM == "fp4" or FORM == "folded":  # noqa: PLR1714 - not in kernels
        g_G = tl.arange(0, BK // 32)
        j_J = tl.arange(0, 16)
        inside = ok_N[:, None, None]
        listed = ok_N[:, None]
        if not EVEN:
            listed = listed & (k + g_G * 32 < C)[None, :]
            inside = inside & (k + g_G * 32 < C)[None, :, None]
        at_N = codes_ptr + expert * (N * C // 2) + n_N * (C // 2)
        at = at_N[:, None, None] + (k // 2 + g_G[None, :, None] * 16 + j_J[None, None, :])
        packed = tl.load(at, inside, 0)
        scale_at = scales_ptr + expert * (N * C // 32) + n_N * (C // 32)
        scales = tl.load(scale_at[:, None] + (k // 32 + g_G[None, :]), listed, 0)
        if OPERAND == "fp8":
            codes = unpacked_codes(packed, scales, ASM)
            return as_operand(codes, True, False)
        else:
            return unpacked_numbers(packed, scales, FORM == "folded", OPERAND == "bf16", ASM)
    else:
        k_K = k + tl.arange(0, BK)
        inside = ok_N[:, None]
        if not EVEN:
            inside = inside & (k_K < C)[None, :]
        at_N = codes_ptr + expert * (N * C) + n_N * C
        tile = tl.load(at_N[:, None] + k_K[None, :], inside, 0)
        if FORM == "fp8":
            return as_operand(tile, OPERAND == "fp8", OPERAND == "bf16")
        else:
            return tile.to(tl.float32) if OPERAND == "fp32" else tile


@triton.jit
def block_scale(
    scales_ptr, expert, n0, n_N, ok_N, k,
    N: tl.constexpr, C: tl.constexpr, BN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Scales of rows of weights at column k: one where they share it, else [BN]."""
    ALONG: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    DOWN: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    at = scales_ptr + expert * (DOWN * ALONG) + k // BLOCK_C
    if BLOCK_N % BN == 0:
        return tl.load(at + n0 // BLOCK_N * ALONG)
    else:
        return tl.load(at + n_N // BLOCK_N * ALONG, ok_N, 0.0)


@triton.jit
def product(x, w, acc, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def scaled(
    partial, row_B, weight, ROWS: tl.constexpr, BLOCKS: tl.constexpr, ONE: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Sums of a group of columns times the scales of rows [BM] and of weights, one or [BN]."""
    if BLOCKS:
        if ONE:
            if ROWS:
                row_B = row_B * weight
            else:
                partial = partial * weight
        else:
            partial = partial * (weight[:, None] if SWAP else weight[None, :])
    if ROWS:
        partial = partial * (row_B[None, :] if SWAP else row_B[:, None])
    return partial


@triton.jit
def gated(gate, up, limit):
    """silu(min(gate, limit)) * clip(up, -limit, limit)."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["tiles"])
def grouped_product(  # noqa: PLR0912, PLR0915 (formats tie all of it together)
    x_ptr,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    w_factors_ptr,
    v_ptr,
    v_scales_ptr,
    v_factors_ptr,
    slots_ptr,
    experts_ptr,
    shares_ptr,
    y_ptr,
    y_scales_ptr,
    tiles,
    x_stride,
    limit,
    E: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    PER: tl.constexpr,
    FORM: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS_FP8: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    INSIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GM: tl.constexpr,
    SWAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """
    Args:
        x_ptr: rows of numbers or (ROWS_FP8) e4m3 codes; slot s has row s // PER.
        x_scales_ptr: [rows, C / GROUP].
        w_ptr, w_scales_ptr, w_factors_ptr: a `Matrix`; v_ptr and so on: up, where w is the gate.
        slots_ptr, experts_ptr: an `Order`; not SORTED: tile n has slot n alone.
        shares_ptr: fp32, of each slot; down alone.
        y_ptr: [slots, N]; codes with their scales where INSIDE is "codes", numbers that were
            rounded to codes where it is "rounded".
    """
    program = tl.program_id(0)
    ACROSS: tl.constexpr = (N + BN - 1) // BN
    band = program // (GM * ACROSS)
    height = tl.minimum(tiles - band * GM, GM)
    within = program - band * (GM * ACROSS)
    tile = band * GM + within % height
    n0 = within // height * BN
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    b_B = tl.arange(0, BM)
    slot_B = tl.where(b_B == 0, tile, -1)
    if SORTED:
        slot_B = tl.load(slots_ptr + tile * BM + b_B)
    row_B = tl.maximum(slot_B, 0) // PER
    n_N = n0 + tl.arange(0, BN)
    ok_N = n_N < N
    if N % BN == 0:
        ok_N = tl.full([BN], True, tl.int1)
    x_at = x_ptr + row_B.to(tl.int64)[:, None] * x_stride + tl.arange(0, BK)[None, :]
    s_at = x_scales_ptr
    if ROWS_FP8:
        s_at = x_scales_ptr + row_B.to(tl.int64) * (C // GROUP)
    SCALED: tl.constexpr = ROWS_FP8 or FORM == "fp8"
    BLOCKS: tl.constexpr = FORM == "fp8"
    ONE: tl.constexpr = BLOCK_N % BN == 0
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    acc_up = acc
    for k in range(0, C, BK):
        scale_B = 1.0
        block = 1.0
        block_up = 1.0
        if C % BK == 0:
            x = tl.load(x_at + k)
        else:
            x = tl.load(x_at + k, (k + tl.arange(0, BK) < C)[None, :], 0)
        if ROWS_FP8:
            scale_B = tl.load(s_at + k // GROUP)
            if E8M0:
                scale_B = e8m0_to_float(scale_B)
            x = as_operand(x, OPERAND == "fp8", OPERAND == "bf16")
        elif OPERAND == "fp32":
            x = x.to(tl.float32)
        w = weight_tile(w_ptr, w_scales_ptr, expert, n_N, ok_N, k, N, C, FORM, BK, OPERAND, ASM)
        if BLOCKS:
            block = block_scale(w_scales_ptr, expert, n0, n_N, ok_N, k, N, C, BN, BLOCK_N, BLOCK_C)
        if SCALED:
            partial = product(x, w, None, SWAP)
            acc += scaled(partial, scale_B, block, ROWS_FP8, BLOCKS, ONE, SWAP)
        else:
            acc = product(x, w, acc, SWAP)
        if GATED:
            v = weight_tile(v_ptr, v_scales_ptr, expert, n_N, ok_N, k, N, C, FORM, BK, OPERAND, ASM)
            if BLOCKS:
                block_up = block_scale(
                    v_scales_ptr, expert, n0, n_N, ok_N, k, N, C, BN, BLOCK_N, BLOCK_C
                )
            if SCALED:
                partial = product(x, v, None, SWAP)
                acc_up += scaled(partial, scale_B, block_up, ROWS_FP8, BLOCKS, ONE, SWAP)
            else:
                acc_up = product(x, v, acc_up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if FORM == "folded":
        acc *= tl.load(w_factors_ptr + expert * N + n_N, ok_N, 0.0)[None, :]
    if GATED:
        if FORM == "folded":
            acc_up *= tl.load(v_factors_ptr + expert * N + n_N, ok_N, 0.0)[None, :]
        y = gated(acc, acc_up, limit)
    else:
        y = acc * tl.load(shares_ptr + slot_B, slot_B >= 0, 0.0)[:, None]
    wide_B = slot_B.to(tl.int64)
    ok = (slot_B >= 0)[:, None] & ok_N[None, :]
    if INSIDE == "":
        y = rounded(y, y_ptr)
        tl.store(y_ptr + wide_B[:, None] * N + n_N[None, :], y.to(y_ptr.dtype.element_ty), ok)
    else:
        # Activations are bf16 before they become codes.
        leave_codes(
            rounded_to_bf16(y), y_ptr, y_scales_ptr, wide_B, n0, slot_B >= 0,
            N, BM, BN, GROUP, E8M0, INSIDE,
        )  # fmt: skip


@triton.jit
def leave_codes(
    y, y_ptr, y_scales_ptr, row_B, n0, ok_B,
    N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Whole groups of channels [BM, BN] from channel n0 on as codes and scales, or rounded."""
    codes, scale = e4m3_groups(y, BM, BN, GROUP)
    n_N = n0 + tl.arange(0, BN)
    ok = ok_B[:, None] & (n_N < N)[None, :]
    to = y_ptr + row_B[:, None] * N + n_N[None, :]
    if INSIDE == "rounded":
        numbers = e4m3_to_float(codes, False) * e8m0_to_float(scale)[:, :, None]
        tl.store(to, tl.reshape(numbers, (BM, BN)).to(y_ptr.dtype.element_ty), ok)
    else:
        tl.store(to, tl.reshape(codes, (BM, BN)), ok)
        g_G = n0 // GROUP + tl.arange(0, BN // GROUP)
        kept = scale.to(tl.uint8) if E8M0 else e8m0_to_float(scale)
        listed = ok_B[:, None] & (g_G < N // GROUP)[None, :]
        tl.store(y_scales_ptr + row_B[:, None] * (N // GROUP) + g_G[None, :], kept, listed)
