"""Sparse prefill over keys of 512 (+ 64) channels in bf16: two tiles of keys an iteration.

One program holds M heads of one row. The scores of both tiles are made before either is weighed,
so that products run under the softmax, and one running maximum serves both. Rows of keys are
gathered by asynchronous copies, one pair of tiles ahead. What is kept of a row's weights is a sum
a tile wide, which is added up once at the end: no exchange between warps in the loop.

Shape suffixes: M heads of a program; N keys of a tile; D value channels; X further channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Parameters for which there is one code, wherever they begin.
LISTS = ("positions", "latent_rows", "sink", "rows", "sequence", "lse")
LOWEST = tl.constexpr(-3e38)  # finite: a row that sees nothing has weights of 0, not NaN


@triton.jit
def scores(
    q_MD, q_MX, keys, zeros, row_N, there_N, scale,
    STRIDE: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(scores [M, N], -inf where there is no key; values [N, D]). A key that is not there is read
    from `zeros`: a mask for each copy would take registers that the sums need."""
    at_N = tl.where(there_N, keys + row_N.to(tl.int64) * STRIDE, zeros)
    at_N1 = tl.multiple_of(at_N, 16)[:, None]  # Triton 3.9 does not see it through `where`
    k_ND = tl.load(at_N1 + tl.arange(0, D)[None, :])
    if UPCAST:
        k_ND = k_ND.to(tl.float32)
    score_MN = tl.dot(q_MD, tl.trans(k_ND))
    if EXTRA > 0:
        k_NX = tl.load(at_N1 + D + tl.arange(0, EXTRA)[None, :])
        if UPCAST:
            k_NX = k_NX.to(tl.float32)
        score_MN = tl.dot(q_MX, tl.trans(k_NX), score_MN)
    return tl.where(there_N[None, :], score_MN * scale, float("-inf")), k_ND


@triton.jit
def add_pair(s0_MN, v0_ND, s1_MN, v1_ND, top_M, mass_MN, acc_MD):
    """(top, mass, acc) with two tiles more."""
    new_M = tl.maximum(top_M, tl.max(tl.maximum(s0_MN, s1_MN), 1))
    shrink_M1 = tl.exp2(top_M - new_M)[:, None]
    p0_MN = tl.exp2(s0_MN - new_M[:, None])
    acc_MD = tl.dot(p0_MN.to(v0_ND.dtype), v0_ND, acc_MD * shrink_M1)
    p1_MN = tl.exp2(s1_MN - new_M[:, None])
    acc_MD = tl.dot(p1_MN.to(v1_ND.dtype), v1_ND, acc_MD)
    return new_M, mass_MN * shrink_M1 + p0_MN + p1_MN, acc_MD


@triton.jit(
    do_not_specialize=("listed", "columns", "table_stride", "selected_stride"),
    do_not_specialize_on_alignment=("selected", "table", "positions", "sequence"),
)
def list_rows(
    selected, table, positions, sequence, rows, listed, columns, table_stride, selected_stride,
    RATIO: tl.constexpr, SEQUENCES: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, BLOCK places of its list): cache rows of the selected entries in 32 bits, -1
    where the row sees none."""
    t = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    name = tl.load(selected + t * selected_stride + place, mask=place < listed, other=-1)
    seen = tl.minimum((tl.load(positions + t) + 1) // RATIO, columns)
    there = (name >= 0) & (name < seen)
    row = tl.where(there, name, 0)
    if SEQUENCES:
        row += tl.load(sequence + t) * table_stride
    if TABLE:
        row = tl.load(table + row, mask=there, other=0)
    tl.store(rows + t * listed + place, tl.where(there, row, -1).to(tl.int32), mask=place < listed)


@triton.jit
def rows_at(rows, first, slot_N, slots, LISTED: tl.constexpr):
    """(cache rows of entry slots, whether there is one); without a list they lie in order."""
    there_N = slot_N < slots
    if LISTED:
        row_N = tl.load(rows + first + slot_N, mask=there_N, other=-1)
        there_N = row_N >= 0
    else:
        row_N = first + slot_N
    return row_N, there_N


@triton.jit(do_not_specialize=("slots", "list_stride"), do_not_specialize_on_alignment=LISTS)
def prefill_pairs(  # noqa: PLR0915
    q, positions, latents, latent_rows, sink, entries, rows, sequence, out, lse, zeros,
    heads, slots, list_stride, scale,
    M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ENTRY_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, LSE: tl.constexpr, SEQUENCES: tl.constexpr, LISTED: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (row, M heads). Rows of keys must be readable by copies of 16 bytes.

    Args:
        rows: int32, rows of `entries`: a list for each row (SELECTED), or for each sequence a
            table; where not LISTED they lie in order, `list_stride` for each sequence.
        slots: length of a list, or of the table.
        zeros: D + EXTRA of them.
        scale: includes log2(e).
    """
    blocks = (heads + M - 1) // M
    t = (tl.program_id(0) // blocks).to(tl.int64)
    h_M = (tl.program_id(0) % blocks) * M + tl.arange(0, M)
    p = tl.load(positions + t)
    n_N = tl.arange(0, BN)
    is_head_M = h_M < heads
    q_M1 = (q + (t * heads + h_M) * (D + EXTRA))[:, None]
    q_MD = tl.load(q_M1 + tl.arange(0, D)[None, :], mask=is_head_M[:, None], other=0.0)
    q_MX = q_MD
    if EXTRA > 0:
        x_1X = D + tl.arange(0, EXTRA)[None, :]
        q_MX = tl.load(q_M1 + x_1X, mask=is_head_M[:, None], other=0.0)
    if UPCAST:
        q_MD, q_MX = q_MD.to(tl.float32), q_MX.to(tl.float32)
    top_M = tl.zeros([M], tl.float32) + LOWEST
    if SINK:
        sink_M = tl.load(sink + h_M, mask=is_head_M, other=0.0) * 1.4426950408889634
        top_M = tl.maximum(sink_M, top_M)
    mass_MN = tl.zeros([M, BN], tl.float32)
    acc_MD = tl.zeros([M, D], tl.float32)
    if WINDOW > 0:
        last = tl.load(latent_rows + t)
        low = last - tl.minimum(p, WINDOW - 1)
        pairs = ((last - low).to(tl.int32) + 2 * BN) // (2 * BN)
        for pair in tl.range(0, pairs, num_stages=STAGES):
            row0_N = low + pair * (2 * BN) + n_N
            row1_N = row0_N + BN
            s0_MN, v0_ND = scores(
                q_MD, q_MX, latents, zeros, row0_N, row0_N <= last, scale,
                LATENT_STRIDE, D, EXTRA, UPCAST,
            )  # fmt: skip
            s1_MN, v1_ND = scores(
                q_MD, q_MX, latents, zeros, row1_N, row1_N <= last, scale,
                LATENT_STRIDE, D, EXTRA, UPCAST,
            )  # fmt: skip
            top_M, mass_MN, acc_MD = add_pair(s0_MN, v0_ND, s1_MN, v1_ND, top_M, mass_MN, acc_MD)
    if RATIO > 0:
        first = p * 0
        if SELECTED:
            first = t * list_stride
        else:
            if SEQUENCES:
                first = tl.load(sequence + t) * list_stride
            slots = tl.minimum((p + 1) // RATIO, slots).to(tl.int32)
        for slot in tl.range(0, slots, 2 * BN, num_stages=STAGES):
            row0_N, there0_N = rows_at(rows, first, slot + n_N, slots, LISTED)
            row1_N, there1_N = rows_at(rows, first, slot + BN + n_N, slots, LISTED)
            s0_MN, v0_ND = scores(
                q_MD, q_MX, entries, zeros, row0_N, there0_N, scale, ENTRY_STRIDE, D, EXTRA, UPCAST
            )
            s1_MN, v1_ND = scores(
                q_MD, q_MX, entries, zeros, row1_N, there1_N, scale, ENTRY_STRIDE, D, EXTRA, UPCAST
            )
            top_M, mass_MN, acc_MD = add_pair(s0_MN, v0_ND, s1_MN, v1_ND, top_M, mass_MN, acc_MD)
    mass_M = tl.sum(mass_MN, 1)
    if SINK:
        mass_M += tl.exp2(sink_M - top_M)
    if LSE:
        lse_M = (top_M + tl.log2(mass_M)) * 0.6931471805599453
        tl.store(lse + t * heads + h_M, lse_M, mask=is_head_M)
    share_M = tl.where(mass_M == 0, 0.0, 1 / mass_M)
    to_MD = (out + (t * heads + h_M) * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(to_MD, (acc_MD * share_M[:, None]).to(out.dtype.element_ty), mask=is_head_M[:, None])
