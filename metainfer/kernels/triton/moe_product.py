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
from metainfer.kernels.triton.moe_unpack import unpacked_codes, unpacked_numbers
from metainfer.kernels.triton.rows import rounded, rounded_to_bf16


@triton.jit
def group_scales(
    scales_at_N, ok_N, k,
    C: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """What groups of fp4 at column k are scaled by: int32 [BN], a byte for each of four groups,
    where a step has four; else uint8 [BN, groups]. Nothing for other forms."""
    if FORM == "fp4" or FORM == "folded":  # noqa: PLR1714 (kernels have no sets)
        if BK == 128 and C % 128 == 0:
            words_at_N = (scales_at_N + k // 32).to(tl.pointer_type(tl.int32))
            return tl.load(words_at_N, ok_N, 0)
        else:
            g_G = k // 32 + tl.arange(0, BK // 32)
            listed = ok_N[:, None] & (g_G < C // 32)[None, :]
            return tl.load(scales_at_N[:, None] + g_G[None, :], listed, 0)
    else:
        return 0


@triton.jit
def weight_bytes(at_N, ok_N, k, C: tl.constexpr, FORM: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] of rows that begin at the addresses at_N, from column k on, as memory has them; of
    fp4 uint8 [BN, groups, 16]."""
    EVEN: tl.constexpr = C % BK == 0
    if FORM == "fp4" or FORM == "folded":  # noqa: PLR1714 (kernels have no sets)
        g_G = tl.arange(0, BK // 32)
        j_J = tl.arange(0, 16)
        inside = ok_N[:, None, None]
        if not EVEN:
            inside = inside & (k + g_G * 32 < C)[None, :, None]
        at = at_N[:, None, None] + (k // 2 + g_G[None, :, None] * 16 + j_J[None, None, :])
        return tl.load(at, inside, 0)
    else:
        k_K = k + tl.arange(0, BK)
        inside = ok_N[:, None]
        if not EVEN:
            inside = inside & (k_K < C)[None, :]
        return tl.load(at_N[:, None] + k_K[None, :], inside, 0.0)


@triton.jit
def weight_operand(
    stored, scales,
    C: tl.constexpr, FORM: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[BN, BK], as a product takes it.

    Args:
        stored: of `weight_bytes`.
        scales: of `group_scales`.
    """
    if FORM == "fp4" or FORM == "folded":  # noqa: PLR1714 (kernels have no sets)
        if BK == 128 and C % BK == 0:
            shift_G = 8 * tl.arange(0, BK // 32)
            scales = ((scales[:, None] >> shift_G[None, :]) & 0xFF).to(tl.uint8)
        if OPERAND == "fp8":
            codes = unpacked_codes(stored, scales, ASM)
            return codes.to(tl.float8e4nv, bitcast=True)
        else:
            return unpacked_numbers(stored, scales, FORM == "folded", OPERAND == "bf16", ASM)
    elif FORM == "fp8" and OPERAND != "fp8":
        numbers = e4m3_to_float(stored, False)
        return numbers.to(tl.bfloat16) if OPERAND == "bf16" else numbers
    else:
        return stored.to(tl.float32) if OPERAND == "fp32" else stored


@triton.jit
def product(x, w, acc, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def scaled(partial, row_B, weight_N, ROWS: tl.constexpr, BLOCKS: tl.constexpr, SWAP: tl.constexpr):
    """Sums over a group of columns times the scales of rows [BM] and of weights, one or [BN]."""
    if BLOCKS == 1:
        row_B = row_B * weight_N
    elif BLOCKS == 2:
        partial = partial * (weight_N[:, None] if SWAP else weight_N[None, :])
    if ROWS or BLOCKS == 1:
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
        w_ptr, w_scales_ptr, w_factors_ptr: a `Matrix`; GATED: gate and below it up.
        slots_ptr, experts_ptr: an `Order`; not SORTED: tile n has slot n alone.
        shares_ptr: fp32, of each slot; down alone.
        y_ptr: [slots, N]; codes with their scales where INSIDE is "codes", numbers that were
            rounded to codes where it is "rounded".
    """
    program = tl.program_id(0)
    BF: tl.constexpr = BN // 2 if GATED else BN
    ACROSS: tl.constexpr = (N + BF - 1) // BF
    band = program // (GM * ACROSS)
    height = tl.minimum(tiles - band * GM, GM)
    within = program - band * (GM * ACROSS)
    tile = band * GM + within % height
    n0 = within // height * BF
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    b_B = tl.arange(0, BM)
    slot_B = tl.where(b_B == 0, tile, -1)
    if SORTED:
        slot_B = tl.load(slots_ptr + tile * BM + b_B)
    row_B = tl.maximum(slot_B, 0) // PER
    # Rows of weights: of gate and up, half of the tile each.
    i_N = tl.arange(0, BN)
    n_N = n0 + i_N % BF
    ok_N = n_N < N
    if N % BF == 0:
        ok_N = tl.full([BN], True, tl.int1)
    HEIGHT: tl.constexpr = 2 * N if GATED else N
    row_N = i_N // BF * N + n_N
    PACKED: tl.constexpr = FORM == "fp4" or FORM == "folded"  # noqa: PLR1714
    WIDTH: tl.constexpr = C // 2 if PACKED else C
    if FORM == "fp8" and OPERAND == "fp8":
        w_ptr = w_ptr.to(tl.pointer_type(tl.float8e4nv))
    w_at_N = w_ptr + expert * (HEIGHT * WIDTH) + row_N * WIDTH
    g_at_N = w_at_N
    if PACKED:
        g_at_N = w_scales_ptr + expert * (HEIGHT * C // 32) + row_N * (C // 32)
    # Scales of blocks: 0 none, 1 one for all the tile, 2 one for each row.
    BLOCKS: tl.constexpr = 0 if FORM != "fp8" else 2 if GATED or BLOCK_N % BN != 0 else 1
    ALONG: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    DOWN: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    b_at = w_scales_ptr
    if BLOCKS == 1:
        b_at = w_scales_ptr + (expert * DOWN + n0 // BLOCK_N) * ALONG
    elif BLOCKS == 2:
        block_N = i_N // BF * DOWN + n_N // BLOCK_N
        b_at = w_scales_ptr + expert * (HEIGHT // N * DOWN * ALONG) + block_N * ALONG
    if ROWS_FP8 and OPERAND == "fp8":
        x_ptr = x_ptr.to(tl.pointer_type(tl.float8e4nv))
    x_at = x_ptr + row_B.to(tl.int64)[:, None] * x_stride + tl.arange(0, BK)[None, :]
    s_at = x_scales_ptr
    if ROWS_FP8:
        s_at = x_scales_ptr + row_B.to(tl.int64) * (C // GROUP)
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    scale_next = tl.load(s_at) if ROWS_FP8 else 0
    group_next = group_scales(g_at_N, ok_N, 0, C, BK, FORM)
    for k in range(0, C, BK):
        # Small numbers are read a step ahead, since they go straight to registers.
        row_scale = scale_next
        group_scale = group_next
        ahead = tl.minimum(k + BK, C - BK)
        if ROWS_FP8:
            scale_next = tl.load(s_at + ahead // GROUP)
        group_next = group_scales(g_at_N, ok_N, ahead, C, BK, FORM)
        if C % BK == 0:
            x = tl.load(x_at + k)
        else:
            x = tl.load(x_at + k, (k + tl.arange(0, BK) < C)[None, :], 0.0)
        if ROWS_FP8 and E8M0:
            row_scale = e8m0_to_float(row_scale)
        if OPERAND == "fp32":
            x = e4m3_to_float(x, False) if ROWS_FP8 else x.to(tl.float32)
        stored = weight_bytes(w_at_N, ok_N, k, C, FORM, BK)
        w = weight_operand(stored, group_scale, C, FORM, BK, OPERAND, ASM)
        if ROWS_FP8 or BLOCKS:
            block = 1.0
            if BLOCKS == 1:
                block = tl.load(b_at + k // BLOCK_C)
            elif BLOCKS == 2:
                block = tl.load(b_at + k // BLOCK_C, ok_N, 0.0)
            if not ROWS_FP8:
                row_scale = tl.full([BM], 1.0, tl.float32)
            partial = product(x, w, None, SWAP)
            acc += scaled(partial, row_scale, block, ROWS_FP8, BLOCKS, SWAP)
        else:
            acc = product(x, w, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    if FORM == "folded":
        acc *= tl.load(w_factors_ptr + expert * HEIGHT + row_N, ok_N, 0.0)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BF)), (0, 2, 1)))
        y = gated(gate, up, limit)
    else:
        y = acc * tl.load(shares_ptr + slot_B, slot_B >= 0, 0.0)[:, None]
    f_F = n0 + tl.arange(0, BF)
    ok_F = f_F < N
    wide_B = slot_B.to(tl.int64)
    ok = (slot_B >= 0)[:, None] & ok_F[None, :]
    if INSIDE == "":
        y = rounded(y, y_ptr)
        tl.store(y_ptr + wide_B[:, None] * N + f_F[None, :], y.to(y_ptr.dtype.element_ty), ok)
    else:
        # Activations are bf16 before they become codes.
        leave_codes(
            rounded_to_bf16(y), y_ptr, y_scales_ptr, wide_B, n0, slot_B >= 0,
            N, BM, BF, GROUP, E8M0, INSIDE,
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
