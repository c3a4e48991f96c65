"""Device code of the mixes of one row of four streams, for calls of few rows.

What one row waits for is a chain of small steps, not memory: the slices of its partials come in
whole words and are added up once, numbers go from thread to thread by shuffles alone, and every
thread does all of Sinkhorn's rounds by itself, in sixteen registers.

Shape suffixes as in `hc_mix`; 1 stands for the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def mixes_of_row(
    partials, base, row, norm_eps,
    K: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: fn z times its scales plus base, for the row of this number (int64); columns from
    M on hold anything."""
    p_P, n_N = tl.arange(0, BP), tl.arange(0, BN)
    at_PN = partials + (row * SPLITS + p_P)[:, None] * BN + n_N[None, :]
    # Columns behind the sum of squares were never written; reading them keeps words whole.
    sum_N = tl.sum(tl.load(at_PN, mask=(p_P < SPLITS)[:, None], other=0.0), 0)
    base_N = tl.load(base + n_N, mask=n_N < M, other=0.0)
    return sum_N * tl.rsqrt(number_of(sum_N, M, BN) / K + norm_eps) + base_N


@triton.jit
def number_of(x_N, place: tl.constexpr, BN: tl.constexpr):
    """The number at a place, in every thread."""
    return tl.sum(tl.where(tl.arange(0, BN) == place, x_N, 0.0), 0)


@triton.jit
def collapsed_row(
    streams, partials, base, row, norm_eps, eps,
    D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """fp32 [1, BD]: the four streams of a row weighted with its own pre, not yet rounded."""
    d_1D = tl.arange(0, BD)[None, :]
    at_1D, is_1D = streams + row * (4 * D) + d_1D, d_1D < D
    # All is on its way before the first sum waits.
    x0_1D = tl.load(at_1D, mask=is_1D, other=0.0).to(tl.float32)
    x1_1D = tl.load(at_1D + D, mask=is_1D, other=0.0).to(tl.float32)
    x2_1D = tl.load(at_1D + 2 * D, mask=is_1D, other=0.0).to(tl.float32)
    x3_1D = tl.load(at_1D + 3 * D, mask=is_1D, other=0.0).to(tl.float32)
    pre_N = tl.sigmoid(mixes_of_row(partials, base, row, norm_eps, 4 * D, M, SPLITS, BP, BN)) + eps
    u_1D = x0_1D * number_of(pre_N, 0, BN) + x1_1D * number_of(pre_N, 1, BN)
    u_1D += x2_1D * number_of(pre_N, 2, BN)
    return u_1D + x3_1D * number_of(pre_N, 3, BN)


@triton.jit
def finish_row(
    partials, base, post, comb, row, norm_eps, eps,
    ITERATIONS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """post and comb of one row."""
    n_N = tl.arange(0, BN)
    m_N = mixes_of_row(partials, base, row, norm_eps, K, M, SPLITS, BP, BN)
    is_post_N = (n_N >= 4) & (n_N < 8)
    tl.store(post + row * 4 + n_N - 4, 2 * tl.sigmoid(m_N), mask=is_post_N)
    m_N = _softmax_of_fours(m_N, eps, BN)
    a0, a1, a2, a3 = _four(m_N, 8, BN)
    b0, b1, b2, b3 = _four(m_N, 12, BN)
    c0, c1, c2, c3 = _four(m_N, 16, BN)
    d0, d1, d2, d3 = _four(m_N, 20, BN)
    # After any round the matrix is r[i] comb[i, j] k[j]; v and w are 1 / r and 1 / k.
    r0, r1, r2, r3 = 1.0, 1.0, 1.0, 1.0
    v0, v1, v2, v3 = 1.0, 1.0, 1.0, 1.0
    w0 = _weighed(a0, b0, c0, d0, r0, r1, r2, r3, eps)
    w1 = _weighed(a1, b1, c1, d1, r0, r1, r2, r3, eps)
    w2 = _weighed(a2, b2, c2, d2, r0, r1, r2, r3, eps)
    w3 = _weighed(a3, b3, c3, d3, r0, r1, r2, r3, eps)
    k0, k1, k2, k3 = _inverses(w0, w1, w2, w3)
    for _ in range(ITERATIONS - 1):
        v0 = _weighed(a0, a1, a2, a3, k0, k1, k2, k3, eps * v0)
        v1 = _weighed(b0, b1, b2, b3, k0, k1, k2, k3, eps * v1)
        v2 = _weighed(c0, c1, c2, c3, k0, k1, k2, k3, eps * v2)
        v3 = _weighed(d0, d1, d2, d3, k0, k1, k2, k3, eps * v3)
        r0, r1, r2, r3 = _inverses(v0, v1, v2, v3)
        w0 = _weighed(a0, b0, c0, d0, r0, r1, r2, r3, eps * w0)
        w1 = _weighed(a1, b1, c1, d1, r0, r1, r2, r3, eps * w1)
        w2 = _weighed(a2, b2, c2, d2, r0, r1, r2, r3, eps * w2)
        w3 = _weighed(a3, b3, c3, d3, r0, r1, r2, r3, eps * w3)
        k0, k1, k2, k3 = _inverses(w0, w1, w2, w3)
    at = comb + row * 16
    _store_four(at, a0 * r0 * k0, a1 * r0 * k1, a2 * r0 * k2, a3 * r0 * k3)
    _store_four(at + 4, b0 * r1 * k0, b1 * r1 * k1, b2 * r1 * k2, b3 * r1 * k3)
    _store_four(at + 8, c0 * r2 * k0, c1 * r2 * k1, c2 * r2 * k2, c3 * r2 * k3)
    _store_four(at + 12, d0 * r3 * k0, d1 * r3 * k1, d2 * r3 * k2, d3 * r3 * k3)


@triton.jit
def _softmax_of_fours(m_N, eps, BN: tl.constexpr):
    """Of every four numbers side by side, and eps."""
    m_Q4 = tl.reshape(m_N, [BN // 4, 4])
    m_Q4 = tl.exp(m_Q4 - tl.max(m_Q4, 1)[:, None])
    return tl.reshape(m_Q4 * (1.0 / tl.sum(m_Q4, 1))[:, None] + eps, [BN])


@triton.jit
def _four(x_N, place: tl.constexpr, BN: tl.constexpr):
    return (
        number_of(x_N, place, BN),
        number_of(x_N, place + 1, BN),
        number_of(x_N, place + 2, BN),
        number_of(x_N, place + 3, BN),
    )


@triton.jit
def _weighed(a, b, c, d, x, y, z, w, rest):
    return ((a * x + rest) + b * y) + (c * z + d * w)


@triton.jit
def _inverses(a, b, c, d):
    """Of four numbers, by two divisions: these are what a round waits for. Sums of rounds lie
    between eps and 4 / eps, so products of two stay far from what fp32 cannot hold."""
    ab, cd = _inverse(a * b), _inverse(c * d)
    return b * ab, a * ab, d * cd, c * cd


@triton.jit
def _inverse(x):
    """1 / x of a normal fp32 in one instruction, off by its last bit at most."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _store_four(at, a, b, c, d):
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)
