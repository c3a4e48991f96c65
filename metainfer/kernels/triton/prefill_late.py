"""Sparse prefill in Gluon for sm_90, in another order: results of a tile beside scores of the next.

One program holds 64 heads of one row. Two warpgroups halve the keys of a tile for the scores and
the value channels for the result; tiles of keys go through two buffers of shared memory, one
filled while the other is multiplied.

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


@gluon.jit
def _weigh(score_MN, there_J, top_M, mass_MN, scale, SINK: gl.constexpr):
    """(top, mass, weights, what the accumulator is worth now) with one tile of scores more."""
    score_MN = gl.where(there_J[None, :], score_MN * scale, float("-inf"))
    new_M = gl.maximum(top_M, gl.max(score_MN, 1))
    safe_M = new_M
    if not SINK:
        safe_M = gl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = gl.exp2(score_MN - safe_M[:, None])
    old_M = gl.exp2(top_M - safe_M)
    return new_M, mass_MN * old_M[:, None] + p_MN, p_MN, old_M


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=LISTS)
def prefill_late(  # noqa: PLR0915 (layouts tie all of it together)
    q, positions, latents, latent_rows, sink, entries, table, sequence, selected, out, lse,
    heads, columns, latent_stride, entry_stride, table_stride, selected_stride, scale,
    M: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    WINDOW: gl.constexpr, RATIO: gl.constexpr, SELECTED: gl.constexpr,
    SINK: gl.constexpr, LSE: gl.constexpr, SEQUENCES: gl.constexpr,
    TABLE: gl.constexpr,
):  # fmt: skip
    """Program (row, 64 heads). Pointers are to the op's arguments; `scale` includes log2(e).

    Args:
        columns: of `selected`; where rows see all entries, as many as the table has.
        table, TABLE: rows of entries; without a table each sequence's lie in order, every
            table_stride rows.
        D, EXTRA: a key has D + EXTRA channels, of which the first D are its value.
    """
    DTYPE: gl.constexpr = q.dtype.element_ty
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    blocks = (heads + M - 1) // M
    t = (gl.program_id(0) // blocks).to(gl.int64)
    h0 = (gl.program_id(0) % blocks) * M
    p = gl.load(positions + t)

    q_s = gl.allocate_shared_memory(DTYPE, [M, D], shared)
    p_s = gl.allocate_shared_memory(DTYPE, [M, BN], shared)
    k_s = gl.allocate_shared_memory(DTYPE, [2, BN, D], shared)
    h_M = h0 + gl.arange(0, M, gl.SliceLayout(1, copy))
    d_D = gl.arange(0, D, gl.SliceLayout(0, copy))
    q_M = q + (t * heads + h_M) * (D + EXTRA)
    copy_async(q_s, q_M[:, None] + d_D[None, :], mask=(h_M < heads)[:, None])
    if EXTRA > 0:
        x_s = gl.allocate_shared_memory(DTYPE, [2, BN, EXTRA], shared)
        qx_s = gl.allocate_shared_memory(DTYPE, [M, EXTRA], shared)
        d_X = D + gl.arange(0, EXTRA, gl.SliceLayout(0, copy))
        copy_async(qx_s, q_M[:, None] + d_X[None, :], mask=(h_M < heads)[:, None])

    low, last, window_tiles, tiles, seen, listed, rows_of = extent_of(
        t, p, latent_rows, table, sequence, selected, columns, table_stride, selected_stride,
        BN, WINDOW, RATIO, SELECTED, SEQUENCES, TABLE,
    )  # fmt: skip
    # Names are read two tiles and addresses one tile before they are used.
    n_N = gl.arange(0, BN, gl.SliceLayout(1, copy))
    n_J = gl.arange(0, BN, gl.SliceLayout(0, s_layout))
    name_N = names_of(listed, n_N - window_tiles * BN, columns, seen, SELECTED)
    at_N, there_N = addresses_of(
        name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
        0, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
    )  # fmt: skip
    copy_async(k_s.index(0), at_N[:, None] + d_D[None, :], mask=there_N[:, None])
    if EXTRA > 0:
        copy_async(x_s.index(0), at_N[:, None] + d_X[None, :], mask=there_N[:, None])
    async_copy.commit_group()
    name_N = names_of(listed, n_N + (1 - window_tiles) * BN, columns, seen, SELECTED)
    at_N, there_N = addresses_of(
        name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
        1, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
    )  # fmt: skip
    name_N = names_of(listed, n_N + (2 - window_tiles) * BN, columns, seen, SELECTED)
    name_J = names_of(listed, n_J - window_tiles * BN, columns, seen, SELECTED)

    h_S = h0 + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    top_M = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    if SINK:
        top_M = gl.load(sink + h_S, mask=h_S < heads, other=0.0) * LOG2E
    mass_MN = gl.zeros([M, BN], gl.float32, s_layout)
    zero_MN = gl.zeros([M, BN], gl.float32, s_layout)
    acc_MD = gl.zeros([M, D], gl.float32, o_layout)
    there_J = seen_of(name_J, low, last, 0, window_tiles, n_J, BN, WINDOW, RATIO)
    name_J = names_of(listed, n_J + (1 - window_tiles) * BN, columns, seen, SELECTED)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    score = warpgroup_mma(q_s, k_s.index(0).permute((1, 0)), zero_MN, use_acc=False, is_async=True)
    if EXTRA > 0:
        score = warpgroup_mma(qx_s, x_s.index(0).permute((1, 0)), score, is_async=True)
    copy_async(k_s.index(1), at_N[:, None] + d_D[None, :], mask=there_N[:, None])
    if EXTRA > 0:
        copy_async(x_s.index(1), at_N[:, None] + d_X[None, :], mask=there_N[:, None])
    async_copy.commit_group()
    at_N, there_N = addresses_of(
        name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
        2, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
    )  # fmt: skip
    name_N = names_of(listed, n_N + (3 - window_tiles) * BN, columns, seen, SELECTED)
    score_MN = warpgroup_mma_wait(0, deps=[score])
    top_M, mass_MN, p_MN, old_M = _weigh(score_MN, there_J, top_M, mass_MN, scale, SINK)
    p_s.store(p_MN.to(DTYPE))
    fence_async_shared()
    for i in range(1, tiles):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        product = warpgroup_mma(p_s, k_s.index((i - 1) % 2), acc_MD, is_async=True)
        score = warpgroup_mma(
            q_s, k_s.index(i % 2).permute((1, 0)), zero_MN, use_acc=False, is_async=True
        )
        if EXTRA > 0:
            score = warpgroup_mma(qx_s, x_s.index(i % 2).permute((1, 0)), score, is_async=True)
            product = warpgroup_mma_wait(2, deps=[product])
        else:
            product = warpgroup_mma_wait(1, deps=[product])
        # All have read the other buffer: fill it while the scores are made.
        barrier()
        copy_async(k_s.index((i + 1) % 2), at_N[:, None] + d_D[None, :], mask=there_N[:, None])
        if EXTRA > 0:
            copy_async(x_s.index((i + 1) % 2), at_N[:, None] + d_X[None, :], mask=there_N[:, None])
        async_copy.commit_group()
        at_N, there_N = addresses_of(
            name_N, rows_of, latents, entries, low, last, latent_stride, entry_stride,
            i + 2, window_tiles, n_N, BN, WINDOW, RATIO, TABLE,
        )  # fmt: skip
        name_N = names_of(listed, n_N + (i + 3 - window_tiles) * BN, columns, seen, SELECTED)
        there_J = seen_of(name_J, low, last, i, window_tiles, n_J, BN, WINDOW, RATIO)
        name_J = names_of(listed, n_J + (i + 1 - window_tiles) * BN, columns, seen, SELECTED)
        score_MN, acc_MD = warpgroup_mma_wait(0, deps=[score, product])
        top_M, mass_MN, p_MN, old_M = _weigh(score_MN, there_J, top_M, mass_MN, scale, SINK)
        p_s.store(p_MN.to(DTYPE))
        acc_MD = acc_MD * gl.convert_layout(old_M, gl.SliceLayout(1, o_layout))[:, None]
    fence_async_shared()
    barrier()
    last_tile = gl.maximum(tiles - 1, 0) % 2
    product = warpgroup_mma(p_s, k_s.index(last_tile), acc_MD, is_async=True)
    acc_MD = warpgroup_mma_wait(0, deps=[product])
    async_copy.wait_group(0)

    mass_M = gl.sum(mass_MN, 1)
    if SINK:
        sink_M = gl.load(sink + h_S, mask=h_S < heads, other=0.0) * LOG2E
        mass_M += gl.exp2(sink_M - top_M)
    if LSE:
        gl.store(lse + t * heads + h_S, (top_M + gl.log2(mass_M)) * LN2, mask=h_S < heads)
    share_M = gl.where(mass_M > 0, 1 / mass_M, 0.0)
    acc_MD = acc_MD * gl.convert_layout(share_M, gl.SliceLayout(1, o_layout))[:, None]
    out_MD = gl.convert_layout(acc_MD.to(DTYPE), copy)
    to_MD = out + ((t * heads + h_M) * D)[:, None] + d_D[None, :]
    gl.store(to_MD, out_MD, mask=(h_M < heads)[:, None])
