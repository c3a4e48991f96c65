"""Device code of the mixes of hyper-connections.

A row's K = S D numbers are multiplied with fn in slices of K by different programs, so that one
row keeps many multiprocessors busy. Each writes its sums to `partials`, [T, SPLITS, BN] fp32:
columns 0 .. M - 1 the products, column M the sum of squares of the streams, column M + 1 (shifted
form) that of the collapsed row. Whoever reads them adds the slices in their order, so results never
depend on which program was first.

fn comes as PARTS matrices [M, K] in the format of the streams, which add up to it.

Shape suffixes: B rows of a tile, R rows, K channels of a step of the product, N columns of
partials, Q columns of all parts of fn, P slices, S streams, C pairs of streams, D channels of a
row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.hc_one_row import collapsed_row, finish_row
from metainfer.kernels.triton.rows import rounded


@triton.jit
def mix_tile(
    streams, parts, partials, tile, split, T,
    K: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, KS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products and sums of squares of BM rows over the slice of KS channels number `split`."""
    row_B = tile * BM + tl.arange(0, BM)
    k_K = split * KS + tl.arange(0, BK)
    is_row_B = row_B < T
    x_at_BK = streams + row_B.to(tl.int64)[:, None] * K + k_K[None, :]
    fn_at_Q, is_fn_Q = mix_columns(parts, K, M, BN, PARTS)
    fn_at_KQ = fn_at_Q[None, :] + k_K[:, None]
    acc_BQ = tl.zeros([BM, PARTS * BN], tl.float32)
    square_BK = tl.zeros([BM, BK], tl.float32)
    for step in range(0, KS, BK):
        x_mask, fn_mask = is_row_B[:, None], is_fn_Q[None, :]
        if not EVEN:
            x_mask = x_mask & (step + k_K < K)[None, :]
            fn_mask = fn_mask & (step + k_K < K)[:, None]
        x_BK = tl.load(x_at_BK + step, mask=x_mask, other=0.0)
        fn_KQ = tl.load(fn_at_KQ + step, mask=fn_mask, other=0.0)
        acc_BQ = mix_products(x_BK, fn_KQ, acc_BQ, T, UPCAST)
        wide_BK = x_BK.to(tl.float32)
        square_BK += wide_BK * wide_BK
    n_N = tl.arange(0, BN)
    out_BN = sum_of_parts(acc_BQ, BM, BN, PARTS)
    out_BN = tl.where(n_N[None, :] == M, tl.sum(square_BK, 1)[:, None], out_BN)
    at_BN = partials + (row_B.to(tl.int64) * SPLITS + split)[:, None] * BN + n_N[None, :]
    tl.store(at_BN, out_BN, mask=is_row_B[:, None] & (n_N <= M)[None, :])


@triton.jit
def mix_columns(parts, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """Where the rows of fn's parts start, as columns side by side, and which of them there are.

    All parts go into one product."""
    q_Q = tl.arange(0, PARTS * BN)
    n_Q = q_Q % BN
    return parts + (q_Q // BN) * (K * M) + n_Q * K, n_Q < M


@triton.jit
def mix_products(x_BK, fn_KQ, acc_BQ, T, UPCAST: tl.constexpr):
    """acc + x fn, finished when it returns. Triton 3.6 lets wgmma run into the next step of a loop,
    but overwrites an operand that is also read otherwise, as x is for its squares, one step too
    early; a use of the sum, here that T rows are not negative, makes it wait."""
    if UPCAST:
        x_BK, fn_KQ = x_BK.to(tl.float32), fn_KQ.to(tl.float32)
    acc_BQ = tl.dot(x_BK, fn_KQ, acc_BQ, input_precision="ieee")
    return tl.where(T >= 0, acc_BQ, 0.0)


@triton.jit
def sum_of_parts(acc_BQ, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    return tl.sum(tl.reshape(acc_BQ, [BM, PARTS, BN]), 1)


@triton.jit
def normed_rows(u_RD, weight_D, norm_eps, u, D: tl.constexpr):
    """fp32: rows rounded as u holds them, divided by their root mean square and multiplied by the
    weight."""
    u_RD = rounded(u_RD, u)
    inverse_R = tl.rsqrt(tl.sum(u_RD * u_RD, 1) / D + norm_eps)
    return u_RD * inverse_R[:, None] * weight_D[None, :]


@triton.jit
def pre_of_rows(
    partials, base, row_R, is_row_R, norm_eps, eps,
    S: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """pre of the rows with these numbers (int64), [R, S]."""
    s_S, p_P = tl.arange(0, S), tl.arange(0, BP)
    at_RP = partials + (row_R[:, None] * SPLITS + p_P[None, :]) * BN
    mask_RP = is_row_R[:, None] & (p_P < SPLITS)[None, :]
    at_RPS = at_RP[:, :, None] + s_S[None, None, :]
    pre_RPS = tl.load(at_RPS, mask=mask_RP[:, :, None], other=0.0)
    square_RP = tl.load(at_RP + M, mask=mask_RP, other=0.0)
    base_S = tl.load(base + s_S)
    inverse_R = tl.rsqrt(tl.sum(square_RP, 1) / (S * D) + norm_eps)
    return tl.sigmoid(tl.sum(pre_RPS, 1) * inverse_R[:, None] + base_S[None, :]) + eps


@triton.jit
def collapse_rows(
    streams, partials, base, norm_weight, u, first, T, norm_eps, eps,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    SPLITS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """u of R rows from `first` on, their streams weighted with their own pre."""
    row_R = first + tl.arange(0, R)
    s_S, d_D = tl.arange(0, S), tl.arange(0, BD)
    is_row_R = row_R < T
    wide_R = row_R.to(tl.int64)
    # All is on its way before the first sum waits.
    x_at_RSD = streams + (wide_R * (S * D))[:, None, None] + (s_S * D)[None, :, None]
    mask_RD = is_row_R[:, None] & (d_D < D)[None, :]
    x_RSD = tl.load(x_at_RSD + d_D[None, None, :], mask=mask_RD[:, None, :], other=0.0)
    if NORM:
        weight_D = tl.load(norm_weight + d_D, mask=d_D < D, other=0.0)
    pre_RS = pre_of_rows(partials, base, wide_R, is_row_R, norm_eps, eps, S, D, M, SPLITS, BP, BN)
    u_RD = tl.sum(x_RSD.to(tl.float32) * pre_RS[:, :, None], 1)
    if NORM:
        u_RD = normed_rows(u_RD, weight_D, norm_eps, u, D)
    to_RD = u + wide_R[:, None] * D + d_D[None, :]
    tl.store(to_RD, rounded(u_RD, u).to(u.dtype.element_ty), mask=mask_RD)


@triton.jit
def finish_mixes(
    partials, base, pre, post, comb, first, T, norm_eps, eps,
    ITERATIONS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    SPLITS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """post, comb and (shifted form) pre of R rows from `first` on."""
    row_R, s_S, c_C = first + tl.arange(0, R), tl.arange(0, S), tl.arange(0, S * S)
    p_P = tl.arange(0, BP)
    is_row_R = row_R < T
    wide_R = row_R.to(tl.int64)
    at_RP = partials + (wide_R[:, None] * SPLITS + p_P[None, :]) * BN
    mask_RP = is_row_R[:, None] & (p_P < SPLITS)[None, :]
    at_RPN, mask_RPN = at_RP[:, :, None], mask_RP[:, :, None]
    # All is on its way before the first sum waits.
    comb_RPC = tl.load(at_RPN + 2 * S + c_C[None, None, :], mask=mask_RPN, other=0.0)
    post_RPS = tl.load(at_RPN + S + s_S[None, None, :], mask=mask_RPN, other=0.0)
    square_RP = tl.load(at_RP + M, mask=mask_RP, other=0.0)
    comb_base_C, post_base_S = tl.load(base + 2 * S + c_C), tl.load(base + S + s_S)
    at_RS, mask_RS = wide_R[:, None] * S + s_S[None, :], is_row_R[:, None]
    inverse_R = tl.rsqrt(tl.sum(square_RP, 1) / K + norm_eps)
    if SHIFTED:
        pre_RPS = tl.load(at_RPN + s_S[None, None, :], mask=mask_RPN, other=0.0)
        pre_RS = tl.sum(pre_RPS, 1) * inverse_R[:, None] + tl.load(base + s_S)[None, :]
        tl.store(pre + at_RS, tl.sigmoid(pre_RS) + eps, mask=mask_RS)
    post_RS = tl.sum(post_RPS, 1) * inverse_R[:, None] + post_base_S[None, :]
    tl.store(post + at_RS, 2 * tl.sigmoid(post_RS), mask=mask_RS)
    comb_RC = tl.sum(comb_RPC, 1) * inverse_R[:, None] + comb_base_C[None, :]
    comb_RSS = sinkhorn(tl.reshape(comb_RC, [R, S, S]), eps, ITERATIONS)
    at_RC = comb + wide_R[:, None] * (S * S) + c_C[None, :]
    tl.store(at_RC, tl.reshape(comb_RSS, [R, S * S]), mask=mask_RS)


@triton.jit
def sinkhorn(comb_RSS, eps, ITERATIONS: tl.constexpr):
    """Softmax of rows, then rounds of division by column sums and row sums, eps as the contract."""
    comb_RSS = tl.exp(comb_RSS - tl.max(comb_RSS, 2)[:, :, None])
    comb_RSS = comb_RSS * (1.0 / tl.sum(comb_RSS, 2))[:, :, None] + eps
    comb_RSS = comb_RSS * (1.0 / (tl.sum(comb_RSS, 1) + eps))[:, None, :]
    for _ in range(ITERATIONS - 1):
        comb_RSS = comb_RSS * (1.0 / (tl.sum(comb_RSS, 2) + eps))[:, :, None]
        comb_RSS = comb_RSS * (1.0 / (tl.sum(comb_RSS, 1) + eps))[:, None, :]
    return comb_RSS


@triton.jit(do_not_specialize=["T"])
def mix_partials(
    streams, parts, partials, T,
    K: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, KS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile of BM rows, slice of K)."""
    mix_tile(
        streams, parts, partials, tl.program_id(0), tl.program_id(1), T, K, M, SPLITS, KS, EVEN,
        BM, BN, BK, PARTS, UPCAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def mix_finish(
    streams, partials, base, norm_weight, u, post, comb, T, norm_eps, eps,
    ITERATIONS: tl.constexpr, R: tl.constexpr, RC: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The first programs finish the mixes of R rows each, the others collapse RC rows each.
    Without rounds (ITERATIONS 0: the head) all collapse."""
    mixing = tl.cdiv(T, R) if ITERATIONS else 0
    pid = tl.program_id(0)
    if pid < mixing:
        if ITERATIONS and R == 1 and S == 4:
            finish_row(
                partials, base, post, comb, pid.to(tl.int64), norm_eps, eps, ITERATIONS, S * D, M,
                SPLITS, BP, BN,
            )  # fmt: skip
        elif ITERATIONS:
            finish_mixes(
                partials, base, None, post, comb, pid * R, T, norm_eps, eps, ITERATIONS, R, S * D,
                S, M, SPLITS, BP, BN, False,
            )  # fmt: skip
    elif R == 1 and RC == 1 and S == 4:
        row, d_D = (pid - mixing).to(tl.int64), tl.arange(0, BD)
        if NORM:
            weight_D = tl.load(norm_weight + d_D, mask=d_D < D, other=0.0)
        u_1D = collapsed_row(streams, partials, base, row, norm_eps, eps, D, BD, M, SPLITS, BP, BN)
        if NORM:
            u_1D = normed_rows(u_1D, weight_D, norm_eps, u, D)
        to_1D = u + row * D + d_D[None, :]
        tl.store(to_1D, rounded(u_1D, u).to(u.dtype.element_ty), mask=(d_D < D)[None, :])
    else:
        collapse_rows(
            streams, partials, base, norm_weight, u, (pid - mixing) * RC, T, norm_eps, eps,
            RC, S, D, BD, M, SPLITS, BP, BN, NORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def shifted_partials(
    streams, parts, given, partials, u, T,
    S: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, DS: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile of BM rows, slice of DS channels of all streams): products, and u of these
    channels, rounded and not yet normed."""
    split = tl.program_id(1)
    row_B = tl.program_id(0) * BM + tl.arange(0, BM)
    n_N = tl.arange(0, BN)
    is_row_B = row_B < T
    wide_B = row_B.to(tl.int64)
    fn_at_Q, is_fn_Q = mix_columns(parts, S * D, M, BN, PARTS)
    acc_BQ = tl.zeros([BM, PARTS * BN], tl.float32)
    square_BK = tl.zeros([BM, BK], tl.float32)
    u_square_BK = tl.zeros([BM, BK], tl.float32)
    for step in range(0, DS, BK):
        d_K = split * DS + step + tl.arange(0, BK)
        x_mask, fn_mask = is_row_B[:, None], is_fn_Q[None, :]
        if not EVEN:
            x_mask = x_mask & (d_K < D)[None, :]
            fn_mask = fn_mask & (d_K < D)[:, None]
        u_BK = tl.zeros([BM, BK], tl.float32)
        for i in tl.static_range(S):
            x_at_BK = streams + wide_B[:, None] * (S * D) + (i * D + d_K)[None, :]
            x_BK = tl.load(x_at_BK, mask=x_mask, other=0.0)
            fn_at_KQ = fn_at_Q[None, :] + (i * D + d_K)[:, None]
            fn_KQ = tl.load(fn_at_KQ, mask=fn_mask, other=0.0)
            acc_BQ = mix_products(x_BK, fn_KQ, acc_BQ, T, UPCAST)
            given_B = tl.load(given + wide_B * S + i, mask=is_row_B, other=0.0)
            x_BK = x_BK.to(tl.float32)
            square_BK += x_BK * x_BK
            u_BK += x_BK * given_B[:, None]
        u_BK = rounded(u_BK, u)
        to_BK = u + wide_B[:, None] * D + d_K[None, :]
        tl.store(to_BK, u_BK.to(u.dtype.element_ty), mask=x_mask)
        u_square_BK += u_BK * u_BK
    out_BN = sum_of_parts(acc_BQ, BM, BN, PARTS)
    out_BN = tl.where(n_N[None, :] == M, tl.sum(square_BK, 1)[:, None], out_BN)
    out_BN = tl.where(n_N[None, :] == M + 1, tl.sum(u_square_BK, 1)[:, None], out_BN)
    at_BN = partials + (wide_B * SPLITS + split)[:, None] * BN + n_N[None, :]
    tl.store(at_BN, out_BN, mask=is_row_B[:, None] & (n_N <= M + 1)[None, :])


@triton.jit(do_not_specialize=["T"])
def shifted_finish(
    partials, base, norm_weight, u, pre, post, comb, T, norm_eps, eps,
    ITERATIONS: tl.constexpr, R: tl.constexpr, RC: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The first programs finish the mixes of R rows each, the others norm RC rows of u each."""
    mixing = tl.cdiv(T, R)
    pid = tl.program_id(0)
    if pid < mixing:
        finish_mixes(
            partials, base, pre, post, comb, pid * R, T, norm_eps, eps, ITERATIONS, R, S * D,
            S, M, SPLITS, BP, BN, True,
        )  # fmt: skip
    elif NORM:
        row_R = (pid - mixing) * RC + tl.arange(0, RC)
        d_D, p_P = tl.arange(0, BD), tl.arange(0, BP)
        wide_R = row_R.to(tl.int64)
        at_RD = u + wide_R[:, None] * D + d_D[None, :]
        mask_RD = (row_R < T)[:, None] & (d_D < D)[None, :]
        u_RD = tl.load(at_RD, mask=mask_RD, other=0.0).to(tl.float32)
        at_RP = partials + (wide_R[:, None] * SPLITS + p_P[None, :]) * BN + M + 1
        mask_RP = (row_R < T)[:, None] & (p_P < SPLITS)[None, :]
        square_R = tl.sum(tl.load(at_RP, mask=mask_RP, other=0.0), 1)
        weight_D = tl.load(norm_weight + d_D, mask=d_D < D, other=0.0)
        u_RD = u_RD * tl.rsqrt(square_R / D + norm_eps)[:, None] * weight_D[None, :]
        tl.store(at_RD, u_RD.to(u.dtype.element_ty), mask=mask_RD)
