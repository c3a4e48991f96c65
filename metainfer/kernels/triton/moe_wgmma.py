"""Products of rows in e4m3 codes with folded fp4 weights of their experts in Gluon, for sm_90.

The same as `moe_product` for many rows, in an order that Triton does not find: while the matrix
instructions of a step run, the weights of the next one are unpacked and rows of the one after that
are on their way. Rows and packed weights come by asynchronous copies, one group a step; unpacked
weights go through two buffers. A thread reads back the packed bytes that it copied itself, so that
one barrier a step is enough.

Shape suffixes: B slots of a tile, N rows of weights, K columns of a step, G groups of 32 columns
of a step, W words of four bytes of a group, F channels of a result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from metainfer.kernels.triton.decode_rows import as_words
from metainfer.kernels.triton.gluon_names import barrier, copy_async
from metainfer.kernels.triton.moe_unpack import TO_E4M3

_TO_E4M3 = gl.constexpr(TO_E4M3.value)
_STEP = gl.constexpr(128)


@gluon.jit
def copy_step(
    step, steps, x_at_BK, w_at_NGW, x_s, p_s, M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Start to copy a step's rows and packed weights, as a group; an empty one after the last."""
    there = step < steps
    copy_async(x_s.index(step % STAGES).slice(0, M), x_at_BK + step * _STEP, mask=there)
    copy_async(p_s.index(step % STAGES), w_at_NGW + step * (_STEP // 8), mask=there)
    async_copy.commit_group()


@gluon.jit
def unpack_step(step, scales_N, p_s, w_s, STAGES: gl.constexpr, layout: gl.constexpr):
    """A step's weights as codes into one of two buffers.

    Args:
        scales_N: what codes of the step's four groups get added, a byte each.
    """
    N: gl.constexpr = w_s.shape[1]
    packed_NGW = p_s.index(step % STAGES).load(layout)
    g_G = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    added_NG = ((scales_N[:, None] >> (g_G * 8)[None, :]) & 0xFF) * 0x01010101
    low, high = gl.inline_asm_elementwise(
        _TO_E4M3, "=&r,=&r,r,r", [packed_NGW, added_NG[:, :, None]], (gl.int32, gl.int32), True, 1
    )
    words_NGHW = gl.join(low, high).permute((0, 1, 3, 2))
    buffer = as_words(
        w_s.index(step % 2), gl.int32, [N, _STEP // 4], gl.NVMMASharedLayout(128, 32, rank=2)
    )
    buffer.store(words_NGHW.reshape([N, _STEP // 4]))


@gluon.jit
def row_scales(scales_at_B, step, E8M0: gl.constexpr):
    """fp32 [B]."""
    scale_B = gl.load(scales_at_B + step)
    if E8M0:
        wide_B = scale_B.to(gl.int32)
        bits_B = gl.where(wide_B == 0, 0x400000, wide_B << 23)
        bits_B = gl.where(wide_B == 255, 0x7FC00000, bits_B)
        scale_B = bits_B.to(gl.float32, bitcast=True)
    return scale_B


@gluon.jit
def walk(  # noqa: PLR0915 (what runs side by side is written side by side)
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, w_factors_ptr, slots_ptr, shares_ptr, y_ptr,
    x_s, w_s, p_s, n0, expert, x_stride, limit,
    M: gl.constexpr, N: gl.constexpr, C: gl.constexpr, PER: gl.constexpr, E8M0: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    """All steps of a tile, of which the first M slots count.

    Args:
        slots_ptr: of this tile.
        x_s, w_s, p_s: shared memory for rows, codes and packed weights of some steps.
    """
    BN: gl.constexpr = w_s.shape[1]
    BF: gl.constexpr = BN // 2 if GATED else BN
    HEIGHT: gl.constexpr = 2 * N if GATED else N
    STEPS: gl.constexpr = C // _STEP
    x_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    p_layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [WARPS, 1, 1], [2, 1, 0])
    p_N: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, p_layout))
    b_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    # Where rows and their scales begin.
    slot_B = gl.load(slots_ptr + gl.arange(0, M, gl.SliceLayout(1, x_layout)))
    row_B = (gl.maximum(slot_B, 0) // PER).to(gl.int64)
    k_K = gl.arange(0, _STEP, gl.SliceLayout(0, x_layout))
    x_at_B = x_ptr.to(gl.pointer_type(gl.float8e4nv)) + row_B * x_stride
    x_at_BK = x_at_B[:, None] + k_K[None, :]
    slot_b = gl.load(slots_ptr + gl.arange(0, M, b_layout))
    s_at_b = x_scales_ptr + (gl.maximum(slot_b, 0) // PER).to(gl.int64) * STEPS
    # Where rows of weights and their scales begin, in words.
    i_N = gl.arange(0, BN, p_N)
    row_N = n0 + i_N
    if GATED:
        row_N = n0 + i_N // 2 + i_N % 2 * N
    w_at_N = w_ptr + expert * (HEIGHT * (C // 8)) + row_N * (C // 8)
    g_at_N = w_scales_ptr + expert * (HEIGHT * (C // 128)) + row_N * (C // 128)
    g_G = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, p_layout)))
    w_W = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, p_layout)))
    w_at_NG = w_at_N[:, None] + (g_G * 4)[None, :]
    w_at_NGW = w_at_NG[:, :, None] + w_W[None, None, :]

    for stage in gl.static_range(STAGES - 1):
        copy_step(stage, STEPS, x_at_BK, w_at_NGW, x_s, p_s, M, STAGES)
    scale_b = row_scales(s_at_b, 0, E8M0)
    added_N = gl.load(g_at_N)
    async_copy.wait_group(STAGES - 2)
    unpack_step(0, added_N, p_s, w_s, STAGES, p_layout)
    added_N = gl.load(g_at_N + min(1, STEPS - 1))
    acc = gl.zeros([M, BN], gl.float32, acc_layout)
    nothing = gl.zeros([M, BN], gl.float32, acc_layout)
    for step in range(STEPS):
        ahead = gl.minimum(step + 1, STEPS - 1)
        later = gl.minimum(step + 2, STEPS - 1)
        # All threads' rows and codes of this step are there, and the last product is done.
        fence_async_shared()
        barrier()
        product = warpgroup_mma(
            x_s.index(step % STAGES).slice(0, M), w_s.index(step % 2).permute((1, 0)), nothing,
            use_acc=False, is_async=True,
        )  # fmt: skip
        copy_step(step + STAGES - 1, STEPS, x_at_BK, w_at_NGW, x_s, p_s, M, STAGES)
        next_scale_b = row_scales(s_at_b, ahead, E8M0)
        next_added_N = gl.load(g_at_N + later)
        async_copy.wait_group(STAGES - 2)
        unpack_step(step + 1, added_N, p_s, w_s, STAGES, p_layout)
        partial = warpgroup_mma_wait(0, deps=[product])
        acc += partial * scale_b[:, None]
        scale_b = next_scale_b
        added_N = next_added_N
    async_copy.wait_group(0)

    c_N = gl.arange(0, BN, gl.SliceLayout(0, acc_layout))
    c_row_N = n0 + c_N
    if GATED:
        c_row_N = n0 + c_N // 2 + c_N % 2 * N
    acc = acc * gl.load(w_factors_ptr + expert * HEIGHT + c_row_N)[None, :]
    y_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    if GATED:
        gate, up = gl.split(acc.reshape([M, BF, 2]))
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        y = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up
        y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), y_layout)
    else:
        share_b = gl.load(shares_ptr + slot_b, mask=slot_b >= 0, other=0.0)
        y = gl.convert_layout((acc * share_b[:, None]).to(y_ptr.dtype.element_ty), y_layout)
    to_slot_B = gl.load(slots_ptr + gl.arange(0, M, gl.SliceLayout(1, y_layout)))
    f_F = n0 + gl.arange(0, BF, gl.SliceLayout(0, y_layout))
    to_B = y_ptr + to_slot_B.to(gl.int64) * N
    gl.store(to_B[:, None] + f_F[None, :], y, mask=(to_slot_B >= 0)[:, None])


@gluon.jit(do_not_specialize=["tiles"])
def grouped_wgmma(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, w_factors_ptr, slots_ptr, experts_ptr, shares_ptr,
    y_ptr, tiles, x_stride, limit,
    E: gl.constexpr, N: gl.constexpr, C: gl.constexpr, PER: gl.constexpr, E8M0: gl.constexpr,
    GATED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GM: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Arguments as those of `moe_product.grouped_product`; w_ptr and w_scales_ptr as words of four
    bytes. Gate and up take turns in the rows of a tile, so that a thread has both of a channel.
    The two warpgroups of a tile of 128 slots halve the slots, or where no more than 64 are used,
    the rows of weights."""
    BF: gl.constexpr = BN // 2 if GATED else BN
    ACROSS: gl.constexpr = N // BF
    program = gl.program_id(0)
    band = program // (GM * ACROSS)
    height = gl.minimum(tiles - band * GM, GM)
    within = program - band * (GM * ACROSS)
    tile = band * GM + within % height
    n0 = within // height * BF
    expert = gl.load(experts_ptr + tile)
    if expert < 0:
        return
    expert = expert.to(gl.int64)
    slots_ptr += tile * BM
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, _STEP], codes)
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [2, BN, _STEP], codes)
    p_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 4, 4], words)
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 32])
    is_half = False
    if BM == 128 and WARPS == 8:
        is_half = gl.load(slots_ptr + BM // 2) < 0
    if is_half:
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 32])
        walk(
            x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, w_factors_ptr, slots_ptr, shares_ptr, y_ptr,
            x_s, w_s, p_s, n0, expert, x_stride, limit,
            64, N, C, PER, E8M0, GATED, STAGES, WARPS, half,
        )  # fmt: skip
    else:
        walk(
            x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, w_factors_ptr, slots_ptr, shares_ptr, y_ptr,
            x_s, w_s, p_s, n0, expert, x_stride, limit,
            BM, N, C, PER, E8M0, GATED, STAGES, WARPS, whole,
        )  # fmt: skip
