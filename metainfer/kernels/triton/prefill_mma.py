"""Sparse prefill in Gluon with mma.sync, for every GPU: layouts and shared memory by hand.

One program holds M heads of one row. All warps share the tile of keys; for the scores they split
heads and keys, for the result value channels alone, so that every value is read once.

Registers and 99 KB of shared memory are what is scarce: of the queries, channels that do not fit
beside two tiles of keys stay in registers.

Shape suffixes: M heads of a program; N keys of a tile (J: the same keys in the layout of scores);
D value channels; X further channels of keys; C channels of one step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from metainfer.kernels.triton.prefill_keys import (
    LISTS,
    NUMBERS,
    addresses_of,
    barrier,
    copy_async,
    extent_of,
    names_of,
    seen_of,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=LISTS)
def prefill_mma(  # noqa: PLR0912, PLR0915 (layouts tie all of it together)
    q, positions, latents, latent_rows, sink, entries, table, sequence, selected, out, lse,
    heads, columns, latent_stride, entry_stride, table_stride, selected_stride, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    WINDOW: gl.constexpr, RATIO: gl.constexpr, SELECTED: gl.constexpr,
    SINK: gl.constexpr, LSE: gl.constexpr, SEQUENCES: gl.constexpr,
    TABLE: gl.constexpr,
    HELD: gl.constexpr, BUFFERS: gl.constexpr, WARPS: gl.constexpr, WARPS_M: gl.constexpr,
    STEP: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Program (row, M heads). Pointers are to the op's arguments; `scale` includes log2(e).

    Args:
        columns: of `selected`; where rows see all entries, as many as the table has.
        table, TABLE: rows of entries; without a table each sequence's lie in order, every
            table_stride rows.
        D, EXTRA: a key has D + EXTRA channels, of which the first D are its value.
        HELD: of the first D channels of the queries, how many (the last ones) registers hold; they
            hold the EXTRA channels too.
        BUFFERS: tiles of keys in shared memory, 2 or more.
        WARPS, WARPS_M: warps of the program, and over how many of them scores split the heads.
        STEP: channels of one step of the scores.
        SPLIT: scores gather in two sums, so that twice as many products are under way.
    """
    DTYPE: gl.constexpr = q.dtype.element_ty
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_M, WARPS // WARPS_M], [16, 8])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    v_layout: gl.constexpr = gl.DotOperandLayout(1, o_layout, 2)
    # Eight rows that one instruction reads lie in different banks.
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    p_shared: gl.constexpr = gl.SwizzledSharedLayout(
        8, 64 // BN if BN < 64 else 1, BN // 8 if BN < 64 else 8, [1, 0]
    )
    KEPT: gl.constexpr = (D - HELD) // STEP
    HELD_STEPS: gl.constexpr = HELD // STEP
    blocks = (heads + M - 1) // M
    t = (gl.program_id(0) // blocks).to(gl.int64)
    h0 = (gl.program_id(0) % blocks) * M
    p = gl.load(positions + t)

    p_s = gl.allocate_shared_memory(DTYPE, [M, BN], p_shared)
    k_s = gl.allocate_shared_memory(DTYPE, [BUFFERS, BN, D], shared)
    d_D = gl.arange(0, D, gl.SliceLayout(0, copy))
    if KEPT > 0:
        q_s = gl.allocate_shared_memory(DTYPE, [KEPT, M, STEP], shared)
        h_M = h0 + gl.arange(0, M, gl.SliceLayout(1, copy))
        c_C = gl.arange(0, STEP, gl.SliceLayout(0, copy))
        q_M = q + (t * heads + h_M) * (D + EXTRA)
        for c in gl.static_range(KEPT):
            from_MC = q_M[:, None] + (c * STEP + c_C)[None, :]
            copy_async(q_s.index(c), from_MC, mask=(h_M < heads)[:, None])
    if EXTRA > 0:
        x_s = gl.allocate_shared_memory(DTYPE, [BUFFERS, BN, EXTRA], shared)
        d_X = D + gl.arange(0, EXTRA, gl.SliceLayout(0, copy))
    h_A = h0 + gl.arange(0, M, gl.SliceLayout(1, a_layout))
    c_A = gl.arange(0, STEP, gl.SliceLayout(0, a_layout))
    q_A = q + (t * heads + h_A) * (D + EXTRA) + (D - HELD)
    held = ()
    for c in gl.static_range(HELD_STEPS + EXTRA // STEP):
        held_MC = q_A[:, None] + (c * STEP + c_A)[None, :]
        new = gl.load(held_MC, mask=(h_A < heads)[:, None], other=0.0)
        held = held + (new,)  # type: ignore[assignment]  # noqa: RUF005

    low, last, window_tiles, tiles, seen, listed, rows_of = extent_of(
        t, p, latent_rows, table, sequence, selected, columns, table_stride, selected_stride,
        BN, WINDOW, RATIO, SELECTED, SEQUENCES, TABLE,
    )  # fmt: skip
    # Names are read one tile and addresses another tile before the copy that uses them.
    n_N = gl.arange(0, BN, gl.SliceLayout(1, copy))
    n_J = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
    for b in gl.static_range(BUFFERS - 1):
        name_N = names_of(listed, n_N + (b - window_tiles) * BN, columns, seen, SELECTED)
        at_N, there_N = addresses_of(
            name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
            b, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
        )  # fmt: skip
        copy_async(k_s.index(b), at_N[:, None] + d_D[None, :], mask=there_N[:, None])
        if EXTRA > 0:
            copy_async(x_s.index(b), at_N[:, None] + d_X[None, :], mask=there_N[:, None])
        async_copy.commit_group()
    name_N = names_of(listed, n_N + (BUFFERS - 1 - window_tiles) * BN, columns, seen, SELECTED)
    at_N, there_N = addresses_of(
        name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
        BUFFERS - 1, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
    )  # fmt: skip
    name_N = names_of(listed, n_N + (BUFFERS - window_tiles) * BN, columns, seen, SELECTED)
    name_J = names_of(listed, n_J - window_tiles * BN, columns, seen, SELECTED)

    h_S = h0 + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    top_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    if SINK:
        top_M = gl.load(sink + h_S, mask=h_S < heads, other=0.0) * LOG2E
    mass_MN = gl.zeros([M, BN], gl.float32, s_layout)
    acc_MD = gl.zeros([M, D], gl.float32, o_layout)
    for i in range(tiles):
        async_copy.wait_group(BUFFERS - 2)
        barrier()
        # The products of the tile before are done: fill its buffer while these run.
        spare = (i + BUFFERS - 1) % BUFFERS
        copy_async(k_s.index(spare), at_N[:, None] + d_D[None, :], mask=there_N[:, None])
        if EXTRA > 0:
            copy_async(x_s.index(spare), at_N[:, None] + d_X[None, :], mask=there_N[:, None])
        async_copy.commit_group()
        at_N, there_N = addresses_of(
            name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
            i + BUFFERS, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
        )  # fmt: skip
        next_N = n_N + (i + BUFFERS + 1 - window_tiles) * BN
        name_N = names_of(listed, next_N, columns, seen, SELECTED)
        there_J = seen_of(name_J, low, last, i, window_tiles, n_J, BN, WINDOW, RATIO)
        name_J = names_of(listed, n_J + (i + 1 - window_tiles) * BN, columns, seen, SELECTED)

        k_i = k_s.index(i % BUFFERS)
        score_MN = gl.zeros([M, BN], gl.float32, s_layout)
        other_MN = gl.zeros([M, BN], gl.float32, s_layout)
        for c in gl.static_range((D + EXTRA) // STEP):
            if c < D // STEP:
                k_C = k_i.slice(c * STEP, STEP, 1)
            else:
                k_C = x_s.index(i % BUFFERS).slice(c * STEP - D, STEP, 1)
            q_MC = q_s.index(c).load(a_layout) if c < KEPT else held[c - KEPT]
            k_CN = k_C.permute((1, 0)).load(b_layout)
            if SPLIT and c % 2 == 1:
                other_MN = mma_v2(q_MC, k_CN, other_MN)
            else:
                score_MN = mma_v2(q_MC, k_CN, score_MN)
        if SPLIT:
            score_MN += other_MN
        score_MN = gl.where(there_J[None, :], score_MN * scale, float("-inf"))
        new_M = gl.maximum(top_M, gl.max(score_MN, 1))
        safe_M = new_M
        if not SINK:
            safe_M = gl.where(new_M == float("-inf"), 0.0, new_M)
        p_MN = gl.exp2(score_MN - safe_M[:, None])
        old_M = gl.exp2(top_M - safe_M)
        top_M = new_M
        mass_MN = mass_MN * old_M[:, None] + p_MN
        p_s.store(p_MN.to(DTYPE))
        acc_MD = acc_MD * gl.convert_layout(old_M, gl.SliceLayout(1, o_layout))[:, None]
        for c in gl.static_range(BN // 16):
            p_MK = p_s.slice(c * 16, 16, 1).load(p_layout)
            v_KD = k_i.slice(c * 16, 16, 0).load(v_layout)
            acc_MD = mma_v2(p_MK, v_KD, acc_MD)
    async_copy.wait_group(0)

    mass_M = gl.sum(mass_MN, 1)
    if SINK:
        sink_M = gl.load(sink + h_S, mask=h_S < heads, other=0.0) * LOG2E
        mass_M += gl.exp2(sink_M - top_M)
    if LSE:
        gl.store(lse + t * heads + h_S, (top_M + gl.log2(mass_M)) * LN2, mask=h_S < heads)
    share_M = gl.where(mass_M > 0, 1 / mass_M, 0.0)
    acc_MD = acc_MD * gl.convert_layout(share_M, gl.SliceLayout(1, o_layout))[:, None]
    h_O = h0 + gl.arange(0, M, gl.SliceLayout(1, o_layout))
    d_O = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    to_MD = out + ((t * heads + h_O) * D)[:, None] + d_O[None, :]
    gl.store(to_MD, acc_MD.to(DTYPE), mask=(h_O < heads)[:, None])
