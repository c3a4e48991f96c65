"""Sparse decode in Gluon for sm_90: asynchronous products of a warpgroup.

One program holds 64 heads of one row and a part of that row's keys. Two warpgroups halve the keys
of a tile for the scores and the value channels for the result; tiles of keys go through two buffers
of shared memory, one filled while the other is multiplied: by asynchronous copies where caches are
numbers, by decoded bytes (`decode_rows`) where they are not.

Shape suffixes: M heads of a program; N keys of a tile (J: the same keys in the layout of scores);
D value channels; X further channels of keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from metainfer.kernels.triton.decode_rows import (
    LENGTHS,
    as_words,
    copy_keys,
    fetch,
    leave,
    listed,
    put,
    rows_in,
    sinks_of,
)
from metainfer.kernels.triton.gluon_names import barrier, copy_async

DENSE = gl.constexpr("dense")
WARPS = gl.constexpr(8)


@gluon.jit
def attend(  # noqa: PLR0915 (what runs side by side is written side by side)
    q_s, qx_s, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    FORM: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """(top, mass, acc) with the tiles from `first` on of one or two lists, whose rows are of one
    format."""
    n_layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    j_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    near_tiles = lists[4]
    stop = lists[5]
    for b in gl.static_range(3):
        rows_s.index(b).store(listed(first + b, lists, BN, NEAR, FAR, n_layout))
    row_N = listed(first + 3, lists, BN, NEAR, FAR, n_layout)
    if FORM == DENSE:
        copy_keys(
            first, rows_s.index(0), k_s.index(0), x_s.index(0), caches, near_tiles, D, EXTRA,
            NEAR, FAR, WARPS,
        )  # fmt: skip
    else:
        words: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        k_w = as_words(k_s, gl.int32, [2, BN, D // 2], words)
        x_w = k_w
        if EXTRA > 0:
            x_w = as_words(x_s, gl.int32, [2, BN, EXTRA // 2], words)
        rows = rows_in(rows_s.index(0), FORM, WARPS)
        raw = fetch(first, rows, caches, near_tiles, FORM, NEAR, FAR, WARPS)
        rows = rows_in(rows_s.index(1), FORM, WARPS)
        put(raw, k_w.index(0), x_w.index(0), FORM, D, WARPS)
        raw = fetch(first + 1, rows, caches, near_tiles, FORM, NEAR, FAR, WARPS)
    zero_MN = gl.zeros([M, BN], gl.float32, s_layout)
    for i in range(first, stop):
        n = i - first
        now = n % 2
        spare = (n + 1) % 2
        if FORM == DENSE:
            async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        k_i = k_s.index(now)
        score = warpgroup_mma(q_s, k_i.permute((1, 0)), zero_MN, use_acc=False, is_async=True)
        if EXTRA > 0:
            score = warpgroup_mma(qx_s, x_s.index(now).permute((1, 0)), score, is_async=True)
        # The products of the tile before are done: fill its buffer while these run.
        if FORM == DENSE:
            copy_keys(
                i + 1, rows_s.index((n + 1) % 4), k_s.index(spare), x_s.index(spare), caches,
                near_tiles, D, EXTRA, NEAR, FAR, WARPS,
            )  # fmt: skip
        else:
            put(raw, k_w.index(spare), x_w.index(spare), FORM, D, WARPS)
            rows = rows_in(rows_s.index((n + 2) % 4), FORM, WARPS)
            raw = fetch(i + 2, rows, caches, near_tiles, FORM, NEAR, FAR, WARPS)
        there_J = rows_s.index(n % 4).load(j_layout) >= 0
        score_MN = warpgroup_mma_wait(0, deps=[score])
        score_MN = gl.where(there_J[None, :], score_MN * scale, float("-inf"))
        new_M = gl.maximum(top_M, gl.max(score_MN, 1))
        safe_M = gl.where(new_M == float("-inf"), 0.0, new_M)
        p_MN = gl.exp2(score_MN - safe_M[:, None])
        old_M = gl.exp2(top_M - safe_M)
        top_M = new_M
        mass_MN = mass_MN * old_M[:, None] + p_MN
        p_s.store(p_MN.to(p_s.dtype))
        rows_s.index((n + 3) % 4).store(row_N)
        row_N = listed(i + 4, lists, BN, NEAR, FAR, n_layout)
        acc_MD = acc_MD * gl.convert_layout(old_M, gl.SliceLayout(1, o_layout))[:, None]
        fence_async_shared()
        barrier()
        product = warpgroup_mma(p_s, k_i, acc_MD, is_async=True)
        acc_MD = warpgroup_mma_wait(0, deps=[product])
    if FORM == DENSE:
        async_copy.wait_group(0)
    return top_M, mass_MN, acc_MD


@gluon.jit(do_not_specialize=LENGTHS)
def decode_wgmma(  # noqa: PLR0915 (layouts tie all of it together)
    q, ring, window_rows, sink, entries, entry_rows, out, lse,
    rows, heads, window_columns, entry_columns, splits,
    ring_stride, entry_stride, window_list_stride, entry_list_stride, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, SINK: gl.constexpr, LSE: gl.constexpr,
    W_FORM: gl.constexpr, E_FORM: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Program (row and 64 heads, split). Arguments as those of `decode_mma`."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    blocks = (heads + M - 1) // M
    t = (gl.program_id(0) // blocks).to(gl.int64)
    h0 = (gl.program_id(0) % blocks) * M
    split = gl.program_id(1)

    q_s = gl.allocate_shared_memory(DTYPE, [M, D], shared)
    p_s = gl.allocate_shared_memory(DTYPE, [M, BN], shared)
    k_s = gl.allocate_shared_memory(DTYPE, [2, BN, D], shared)
    rows_s = gl.allocate_shared_memory(gl.int32, [4, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    h_M = h0 + gl.arange(0, M, gl.SliceLayout(1, copy))
    d_D = gl.arange(0, D, gl.SliceLayout(0, copy))
    q_M = q + (t * heads + h_M) * (D + EXTRA)
    copy_async(q_s, q_M[:, None] + d_D[None, :], mask=(h_M < heads)[:, None])
    x_s = k_s
    qx_s = q_s
    if EXTRA > 0:
        x_s = gl.allocate_shared_memory(DTYPE, [2, BN, EXTRA], shared)
        qx_s = gl.allocate_shared_memory(DTYPE, [M, EXTRA], shared)
        d_X = D + gl.arange(0, EXTRA, gl.SliceLayout(0, copy))
        copy_async(qx_s, q_M[:, None] + d_X[None, :], mask=(h_M < heads)[:, None])
    async_copy.commit_group()

    sink_M = sinks_of(sink, h0, heads, split, M, SINK, gl.SliceLayout(1, s_layout))
    top_M = sink_M
    mass_MN = gl.zeros([M, BN], gl.float32, s_layout)
    acc_MD = gl.zeros([M, D], gl.float32, o_layout)

    window_tiles = (window_columns + BN - 1) // BN
    tiles = window_tiles + (entry_columns + BN - 1) // BN
    first = split * tiles // splits
    stop = (split + 1) * tiles // splits
    near_list = window_rows + t * window_list_stride
    far_list = entry_rows + t * entry_list_stride
    caches = (ring, entries, ring_stride, entry_stride)
    if W_FORM != DENSE or E_FORM != DENSE:
        async_copy.wait_group(0)
    if APART:
        near_stop = gl.minimum(stop, window_tiles)
        lists = (near_list, far_list, window_columns, entry_columns, window_tiles, near_stop)
        top_M, mass_MN, acc_MD = attend(
            q_s, qx_s, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
            M, BN, D, EXTRA, W_FORM, True, False, s_layout, o_layout,
        )  # fmt: skip
        far_first = gl.maximum(first, window_tiles)
        lists = (near_list, far_list, window_columns, entry_columns, window_tiles, stop)
        top_M, mass_MN, acc_MD = attend(
            q_s, qx_s, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, far_first,
            scale, M, BN, D, EXTRA, E_FORM, False, True, s_layout, o_layout,
        )  # fmt: skip
    else:
        FORM: gl.constexpr = W_FORM if WINDOW else E_FORM
        lists = (near_list, far_list, window_columns, entry_columns, window_tiles, stop)
        top_M, mass_MN, acc_MD = attend(
            q_s, qx_s, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
            M, BN, D, EXTRA, FORM, WINDOW, ENTRIES, s_layout, o_layout,
        )  # fmt: skip

    leave(
        out, lse, (split * rows + t) * heads, h0, heads, top_M, mass_MN, sink_M, acc_MD, M, D, LSE,
        s_layout, o_layout,
    )  # fmt: skip
