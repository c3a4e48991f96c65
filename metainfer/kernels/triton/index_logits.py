"""Scores of the lightning indexer: relu of products, summed over the heads with their weights.

One program holds the queries of a few rows and goes through blocks of keys. A product has the keys
in its rows and the heads of all rows of the program in its columns, so that the sum over the heads
stays within few threads. Scales of coded queries are folded into the weights and those of keys
applied to the sum.

Shape suffixes: N columns (heads of rows), R rows of the program, E entries of a block of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.index_keys import halves_of_e2m1, operand_of_e4m3
from metainfer.kernels.triton.topk_cut import LEAST


@triton.jit(
    do_not_specialize=("rows", "entries", "first", "splits", "table_stride", "candidates_width"),
    do_not_specialize_on_alignment=("key_rows", "sequence_T", "seen_T", "candidates", "weights"),
)
def index_logits(  # noqa: PLR0912, PLR0915 (formats and lists tie all of it together)
    q, q_scales, weights, keys, key_scales, key_rows, sequence_T, seen_T, candidates, scores,
    rows, entries, first, splits, weights_stride, table_stride, candidates_width, width, scale,
    HEADS: tl.constexpr, HEADS_POWER: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, Q_FORM: tl.constexpr, K_FORM: tl.constexpr, FP8: tl.constexpr,
    OWN_LISTS: tl.constexpr, CANDIDATE_BLOCK: tl.constexpr, SKIPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (R rows, one of `splits` interleaved shares of the blocks of keys).

    Args:
        q, q_scales: the op's queries; scales None where they are plain.
        keys, key_scales: the op's keys; scales None where they are plain.
        key_rows: int64 lists of rows of keys; None where each sequence's keys lie in order, every
            table_stride rows.
        sequence_T: which list; None where all rows have the first, or each its own (OWN_LISTS).
        seen_T: int32, entries that a row sees, or places of its candidates.
        candidates: int64 [rows, candidates_width], blocks of entries; with them R is 1, and scores
            are of the places of listed blocks.
        scores: fp32 [rows, width], written below seen_T; not of rows that see SKIPPED or fewer.
        entries, first: how many are looked at, from which on. Where keys lie in order, those of
            each sequence begin with `first`.
        scale: of all scores.
        Q_FORM, K_FORM: "dense", "index_fp8", "index_fp4".
    """
    N: tl.constexpr = R * HEADS_POWER
    t0 = (tl.program_id(0) * R).to(tl.int64)
    share = tl.program_id(1)
    column_N = tl.arange(0, N)
    r_N, h_N = column_N // HEADS_POWER, column_N % HEADS_POWER
    is_there_N = (t0 + r_N < rows) & (h_N < HEADS)
    head_N = r_N * HEADS + h_N
    weights_at_N = weights + (t0 + r_N) * weights_stride + h_N
    weight_N = tl.load(weights_at_N, mask=is_there_N, other=0.0).to(tl.float32) * scale
    if Q_FORM == "index_fp4":
        q += t0 * HEADS * (WIDTH // 2)
        c_C = tl.arange(0, WIDTH // 2)[None, :]
        q_NC = tl.load(q + head_N[:, None] * (WIDTH // 2) + c_C, mask=is_there_N[:, None], other=0)
        q_scales_at = q_scales.to(tl.pointer_type(tl.int32)) + t0 * HEADS
        q_scale_N = tl.load(q_scales_at + head_N, mask=is_there_N, other=0)
        even_NC, odd_NC = halves_of_e2m1(q_NC, q_scale_N, UPCAST)
        if K_FORM == "dense":
            q_NC = tl.reshape(tl.join(even_NC, odd_NC), [N, WIDTH])
    else:
        q += t0 * HEADS * WIDTH
        c_C = tl.arange(0, WIDTH)[None, :]
        q_NC = tl.load(q + head_N[:, None] * WIDTH + c_C, mask=is_there_N[:, None], other=0)
        if Q_FORM == "index_fp8":
            q_scales_at = q_scales.to(tl.pointer_type(tl.float32)) + t0 * HEADS
            weight_N *= tl.load(q_scales_at + head_N, mask=is_there_N, other=0.0)
            q_NC = operand_of_e4m3(q_NC, FP8 and K_FORM == "index_fp8", UPCAST)
        elif UPCAST:
            q_NC = q_NC.to(tl.float32)

    r_R = tl.arange(0, R)
    row_R = t0 + r_R
    is_row_R = row_R < rows
    seen_R = tl.load(seen_T + row_R, mask=is_row_R, other=0)
    seen_R = tl.where(seen_R > SKIPPED, tl.minimum(seen_R - first, entries), 0)
    PASSES: tl.constexpr = R if sequence_T is not None else 1
    sequence_R = tl.zeros([R], tl.int64)
    if sequence_T is not None:
        sequence_R = tl.load(sequence_T + row_R, mask=is_row_R, other=-1)
    # One pass for each sequence that the rows belong to; a row that is not the first of its
    # sequence leads none.
    for lead in range(0, PASSES):
        sequence = tl.zeros([], tl.int64)
        if OWN_LISTS:
            sequence += t0
        elif sequence_T is not None:
            sequence = tl.max(tl.where(r_R == lead, sequence_R, -1), 0)
        is_mine_R = sequence_R == sequence
        if OWN_LISTS:
            is_mine_R = is_row_R
        stops_R = tl.where(is_mine_R, seen_R, 0)
        is_first = tl.min(tl.where(is_mine_R, r_R, R), 0) == lead
        stop = tl.where(is_first, tl.max(stops_R, 0), 0)
        for block in range(share, tl.cdiv(stop, BLOCK), splits):
            e_E = block * BLOCK + tl.arange(0, BLOCK)
            entry_E = e_E.to(tl.int64)
            is_there_E = e_E < stop
            if candidates is not None:
                listed_at_E = candidates + t0 * candidates_width + e_E // CANDIDATE_BLOCK
                listed_E = tl.load(listed_at_E, mask=is_there_E, other=0)
                entry_E = listed_E * CANDIDATE_BLOCK + e_E % CANDIDATE_BLOCK
            entry_E += sequence * table_stride
            if key_rows is not None:
                entry_E = tl.load(key_rows + first + entry_E, mask=is_there_E, other=-1)
                is_there_E &= entry_E >= 0
            if K_FORM == "index_fp4":
                k_at_EC = keys + entry_E[:, None] * (WIDTH // 2) + c_C
                k_EC = tl.load(k_at_EC, mask=is_there_E[:, None], other=0)
                k_scales_at_E = key_scales.to(tl.pointer_type(tl.int32)) + entry_E
                k_scale_E = tl.load(k_scales_at_E, mask=is_there_E, other=0)
                k_even_EC, k_odd_EC = halves_of_e2m1(k_EC, k_scale_E, UPCAST)
                product_EN = tl.dot(k_even_EC, tl.trans(even_NC), input_precision="ieee")
                product_EN = tl.dot(k_odd_EC, tl.trans(odd_NC), product_EN, input_precision="ieee")
            else:
                d_D = tl.arange(0, WIDTH)[None, :]
                k_at_EC = keys + entry_E[:, None] * WIDTH + d_D
                k_EC = tl.load(k_at_EC, mask=is_there_E[:, None], other=0)
                if K_FORM == "index_fp8":
                    k_EC = operand_of_e4m3(k_EC, FP8, UPCAST)
                else:
                    k_EC = k_EC.to(q_NC.dtype)
                product_EN = tl.dot(k_EC, tl.trans(q_NC), input_precision="ieee")
            # A NaN passes through: it has to rank as the worst.
            product_EN = tl.maximum(product_EN, 0.0, propagate_nan=tl.PropagateNan.ALL)
            product_ERH = tl.reshape(product_EN * weight_N[None, :], [BLOCK, R, HEADS_POWER])
            score_ER = tl.sum(product_ERH, 2)
            if K_FORM == "index_fp8":
                k_scales_at_E = key_scales.to(tl.pointer_type(tl.float32)) + entry_E
                k_scale_E = tl.load(k_scales_at_E, mask=is_there_E, other=0.0)
                score_ER *= k_scale_E[:, None]
            score_ER = tl.where(score_ER > LEAST, score_ER, LEAST)
            to_ER = scores + row_R[None, :] * width + first + e_E[:, None]
            tl.store(to_ER, score_ER, mask=e_E[:, None] < stops_R[None, :])
