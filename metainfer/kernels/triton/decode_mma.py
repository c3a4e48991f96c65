"""Sparse decode in Gluon with mma.sync, for every GPU: layouts and shared memory by hand.

One program holds M heads of one row and a part of that row's keys. All warps share the tile of
keys; for the scores they split heads and keys, for the result value channels alone, so that every
value is read once.

Caches of numbers are copied into shared memory asynchronously, BUFFERS tiles at a time. Caches of
bytes go through registers (`decode_rows`): while the scores of a tile are made, the bytes of the
next one are decoded into the other of two buffers, and those after it are on their way.

Shape suffixes: M heads of a program; N keys of a tile (J: the same keys in the layout of scores);
D value channels; X further channels of keys; C channels of one step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

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


@gluon.jit
def scores_of(
    q_s, held, k_s, x_s, there_J, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr, KEPT: gl.constexpr,
    STEP: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """fp32 [M, N]: scaled scores of one tile, -inf where there is no key. Two sums, so that twice
    as many products are under way."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, s_layout, 2)
    even_MN = gl.zeros([M, BN], gl.float32, s_layout)
    odd_MN = gl.zeros([M, BN], gl.float32, s_layout)
    for c in gl.static_range((D + EXTRA) // STEP):
        if c < D // STEP:  # noqa: SIM108 (one of them has no such slice)
            k_NC = k_s.slice(c * STEP, STEP, 1)
        else:
            k_NC = x_s.slice(c * STEP - D, STEP, 1)
        q_MC = q_s.index(c).load(a_layout) if c < KEPT else held[c - KEPT]
        k_CN = k_NC.permute((1, 0)).load(b_layout)
        if c % 2 == 1:
            odd_MN = mma_v2(q_MC, k_CN, odd_MN)
        else:
            even_MN = mma_v2(q_MC, k_CN, even_MN)
    return gl.where(there_J[None, :], (even_MN + odd_MN) * scale, float("-inf"))


@gluon.jit
def add_values(
    score_MN, k_s, p_s, rows_s, row_N, top_M, mass_MN, acc_MD,
    BN: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """(top, mass, acc) with one tile of keys more. Between barriers that are there anyway, row_N
    goes into rows_s."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    v_layout: gl.constexpr = gl.DotOperandLayout(1, o_layout, 2)
    new_M = gl.maximum(top_M, gl.max(score_MN, 1))
    safe_M = gl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = gl.exp2(score_MN - safe_M[:, None])
    old_M = gl.exp2(top_M - safe_M)
    mass_MN = mass_MN * old_M[:, None] + p_MN
    p_s.store(p_MN.to(p_s.dtype))
    rows_s.store(row_N)
    acc_MD = acc_MD * gl.convert_layout(old_M, gl.SliceLayout(1, o_layout))[:, None]
    for c in gl.static_range(BN // 16):
        p_MK = p_s.slice(c * 16, 16, 1).load(p_layout)
        v_KD = k_s.slice(c * 16, 16, 0).load(v_layout)
        acc_MD = mma_v2(p_MK, v_KD, acc_MD)
    return new_M, mass_MN, acc_MD


@gluon.jit
def attend_bytes(
    q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr, KEPT: gl.constexpr,
    STEP: gl.constexpr, FORM: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    WARPS: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """(top, mass, acc) with the tiles from `first` on of one or two lists, whose rows are bytes
    of one format."""
    n_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    j_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    k_w = as_words(k_s, gl.int32, [2, BN, D // 2], words)
    x_w = k_w
    if EXTRA > 0:
        x_w = as_words(x_s, gl.int32, [2, BN, EXTRA // 2], words)
    near_tiles = lists[4]
    stop = lists[5]
    for b in gl.static_range(3):
        rows_s.index(b).store(listed(first + b, lists, BN, NEAR, FAR, n_layout))
    row_N = listed(first + 3, lists, BN, NEAR, FAR, n_layout)
    rows = rows_in(rows_s.index(0), FORM, WARPS)
    raw = fetch(first, rows, caches, near_tiles, FORM, NEAR, FAR, WARPS)
    rows = rows_in(rows_s.index(1), FORM, WARPS)
    put(raw, k_w.index(0), x_w.index(0), FORM, D, WARPS)
    raw = fetch(first + 1, rows, caches, near_tiles, FORM, NEAR, FAR, WARPS)
    for i in range(first, stop):
        n = i - first
        k_i = k_s.index(n % 2)
        x_i = x_s.index(n % 2)
        there_J = rows_s.index(n % 4).load(j_layout) >= 0
        score_MN = scores_of(
            q_s, held, k_i, x_i, there_J, scale, M, BN, D, EXTRA, KEPT, STEP, s_layout
        )
        put(raw, k_w.index((n + 1) % 2), x_w.index((n + 1) % 2), FORM, D, WARPS)
        rows = rows_in(rows_s.index((n + 2) % 4), FORM, WARPS)
        raw = fetch(i + 2, rows, caches, near_tiles, FORM, NEAR, FAR, WARPS)
        top_M, mass_MN, acc_MD = add_values(
            score_MN, k_i, p_s, rows_s.index((n + 3) % 4), row_N, top_M, mass_MN, acc_MD, BN,
            o_layout,
        )  # fmt: skip
        row_N = listed(i + 4, lists, BN, NEAR, FAR, n_layout)
    return top_M, mass_MN, acc_MD


@gluon.jit
def attend_numbers(
    q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr, KEPT: gl.constexpr,
    STEP: gl.constexpr, BUFFERS: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    WARPS: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """The same with rows that are numbers."""
    n_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    j_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    near_tiles = lists[4]
    stop = lists[5]
    for b in gl.static_range(BUFFERS):
        rows_s.index(b).store(listed(first + b, lists, BN, NEAR, FAR, n_layout))
    row_N = listed(first + BUFFERS, lists, BN, NEAR, FAR, n_layout)
    for b in gl.static_range(BUFFERS - 1):
        copy_keys(
            first + b, rows_s.index(b), k_s.index(b), x_s.index(b), caches, near_tiles, D, EXTRA,
            NEAR, FAR, WARPS,
        )  # fmt: skip
    for i in range(first, stop):
        n = i - first
        async_copy.wait_group(BUFFERS - 2)
        barrier()
        # The products of the tile before are done: fill its buffer while these run.
        ahead = n + BUFFERS - 1
        spare = ahead % BUFFERS
        there_J = rows_s.index(n % 4).load(j_layout) >= 0
        copy_keys(
            i + BUFFERS - 1, rows_s.index(ahead % 4), k_s.index(spare), x_s.index(spare), caches,
            near_tiles, D, EXTRA, NEAR, FAR, WARPS,
        )  # fmt: skip
        k_i = k_s.index(n % BUFFERS)
        x_i = x_s.index(n % BUFFERS)
        score_MN = scores_of(
            q_s, held, k_i, x_i, there_J, scale, M, BN, D, EXTRA, KEPT, STEP, s_layout
        )
        top_M, mass_MN, acc_MD = add_values(
            score_MN, k_i, p_s, rows_s.index((n + BUFFERS) % 4), row_N, top_M, mass_MN, acc_MD, BN,
            o_layout,
        )  # fmt: skip
        row_N = listed(i + BUFFERS + 1, lists, BN, NEAR, FAR, n_layout)
    async_copy.wait_group(0)
    return top_M, mass_MN, acc_MD


@gluon.jit
def attend_lists(
    q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr, KEPT: gl.constexpr,
    STEP: gl.constexpr, BUFFERS: gl.constexpr, FORM: gl.constexpr, NEAR: gl.constexpr,
    FAR: gl.constexpr, WARPS: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    if FORM == DENSE:
        top_M, mass_MN, acc_MD = attend_numbers(
            q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
            M, BN, D, EXTRA, KEPT, STEP, BUFFERS, NEAR, FAR, WARPS, s_layout, o_layout,
        )  # fmt: skip
    else:
        top_M, mass_MN, acc_MD = attend_bytes(
            q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
            M, BN, D, EXTRA, KEPT, STEP, FORM, NEAR, FAR, WARPS, s_layout, o_layout,
        )  # fmt: skip
    return top_M, mass_MN, acc_MD


@gluon.jit(do_not_specialize=LENGTHS)
def decode_mma(  # noqa: PLR0915 (layouts tie all of it together)
    q, ring, window_rows, sink, entries, entry_rows, out, lse,
    rows, heads, window_columns, entry_columns, splits,
    ring_stride, entry_stride, window_list_stride, entry_list_stride, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    WINDOW: gl.constexpr, ENTRIES: gl.constexpr, SINK: gl.constexpr, LSE: gl.constexpr,
    W_FORM: gl.constexpr, E_FORM: gl.constexpr, APART: gl.constexpr,
    HELD: gl.constexpr, BUFFERS: gl.constexpr, WARPS: gl.constexpr, WARPS_M: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Program (row and M heads, split). Pointers are to the op's arguments; `scale` includes
    log2(e). Where one of the lists is not there, the other one stands in for it.

    Args:
        out, lse: [splits, rows, heads, D] and [splits, rows, heads]: each split leaves its own
            result; the first one counts the sink.
        D, EXTRA: a key has D + EXTRA channels, of which the first D are its value.
        WINDOW, ENTRIES: whether there is such a list.
        W_FORM, E_FORM: formats of ring and entries. APART: there are both lists, in two formats.
        HELD: of the first D channels of the queries, how many (the last ones) registers hold; they
            hold the EXTRA channels too.
        BUFFERS: tiles of keys in shared memory, 2 or more; 2 for bytes.
        WARPS, WARPS_M: warps of the program, and over how many of them scores split the heads.
        STEP: channels of one step of the scores.
    """
    DTYPE: gl.constexpr = q.dtype.element_ty
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_M, WARPS // WARPS_M], [16, 8])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    # Eight rows that one instruction reads lie in different banks.
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    p_shared: gl.constexpr = gl.SwizzledSharedLayout(
        8, 64 // BN if BN < 64 else 1, BN // 8 if BN < 64 else 8, [1, 0]
    )
    KEPT: gl.constexpr = (D - HELD) // STEP
    blocks = (heads + M - 1) // M
    t = (gl.program_id(0) // blocks).to(gl.int64)
    h0 = (gl.program_id(0) % blocks) * M
    split = gl.program_id(1)

    p_s = gl.allocate_shared_memory(DTYPE, [M, BN], p_shared)
    k_s = gl.allocate_shared_memory(DTYPE, [BUFFERS, BN, D], shared)
    rows_s = gl.allocate_shared_memory(gl.int32, [4, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x_s = k_s
    if EXTRA > 0:
        x_s = gl.allocate_shared_memory(DTYPE, [BUFFERS, BN, EXTRA], shared)
    q_s = k_s
    if KEPT > 0:
        q_s = gl.allocate_shared_memory(DTYPE, [KEPT, M, STEP], shared)
        h_M = h0 + gl.arange(0, M, gl.SliceLayout(1, copy))
        c_C = gl.arange(0, STEP, gl.SliceLayout(0, copy))
        q_M = q + (t * heads + h_M) * (D + EXTRA)
        for c in gl.static_range(KEPT):
            from_MC = q_M[:, None] + (c * STEP + c_C)[None, :]
            copy_async(q_s.index(c), from_MC, mask=(h_M < heads)[:, None])
        async_copy.commit_group()
    h_A = h0 + gl.arange(0, M, gl.SliceLayout(1, a_layout))
    c_A = gl.arange(0, STEP, gl.SliceLayout(0, a_layout))
    q_A = q + (t * heads + h_A) * (D + EXTRA) + (D - HELD)
    held = ()
    for c in gl.static_range((HELD + EXTRA) // STEP):
        held_MC = q_A[:, None] + (c * STEP + c_A)[None, :]
        new = gl.load(held_MC, mask=(h_A < heads)[:, None], other=0.0)
        held = held + (new,)  # type: ignore[assignment]  # noqa: RUF005

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
    if KEPT > 0 and (W_FORM != DENSE or E_FORM != DENSE):
        async_copy.wait_group(0)
        barrier()
    if APART:
        near_stop = gl.minimum(stop, window_tiles)
        lists = (near_list, far_list, window_columns, entry_columns, window_tiles, near_stop)
        top_M, mass_MN, acc_MD = attend_lists(
            q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
            M, BN, D, EXTRA, KEPT, STEP, BUFFERS, W_FORM, True, False, WARPS, s_layout, o_layout,
        )  # fmt: skip
        far_first = gl.maximum(first, window_tiles)
        lists = (near_list, far_list, window_columns, entry_columns, window_tiles, stop)
        top_M, mass_MN, acc_MD = attend_lists(
            q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, far_first,
            scale, M, BN, D, EXTRA, KEPT, STEP, BUFFERS, E_FORM, False, True, WARPS, s_layout,
            o_layout,
        )  # fmt: skip
    else:
        FORM: gl.constexpr = W_FORM if WINDOW else E_FORM
        lists = (near_list, far_list, window_columns, entry_columns, window_tiles, stop)
        top_M, mass_MN, acc_MD = attend_lists(
            q_s, held, k_s, x_s, p_s, rows_s, top_M, mass_MN, acc_MD, lists, caches, first, scale,
            M, BN, D, EXTRA, KEPT, STEP, BUFFERS, FORM, WINDOW, ENTRIES, WARPS, s_layout, o_layout,
        )  # fmt: skip

    leave(
        out, lse, (split * rows + t) * heads, h0, heads, top_M, mass_MN, sink_M, acc_MD, M, D, LSE,
        s_layout, o_layout,
    )  # fmt: skip
