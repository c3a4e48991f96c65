"""hc.expand_mix_fp8 in Triton: one sublayer's output into the streams, and the next one's rows.

Two forms. "steps": the four kernels of `hc.expand`, `hc.mix` and `norm.rms_norm_fp8`, one after the
other. "triton": of few rows, two launches. The first expands its channels of all streams and
multiplies what it has just made with fn; the second adds the slices up, does Sinkhorn's rounds in
one program a row and, in another, collapses, norms and rounds the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton import hc, hc_rows, norm
from metainfer.kernels.triton.backend import STEPS, Declared, on_gpu
from metainfer.kernels.triton.codes import e4m3_groups, e8m0_to_float
from metainfer.kernels.triton.hc import Mixes
from metainfer.kernels.triton.hc_mix import (
    mix_columns,
    mix_products,
    normed_rows,
    pre_of_rows,
    sum_of_parts,
)
from metainfer.kernels.triton.hc_rows import warps_of
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.kernels.triton.rows import rounded
from metainfer.ops.base import Target
from metainfer.ops.hc import ExpandMixFp8Case

_STREAMS = 4
_STEP = 32  # channels of all streams that are expanded and multiplied at a time
_MOST_ROWS = 32  # of a tile: more do not fit in registers

Tensors = tuple[torch.Tensor, ...]


@triton.jit(do_not_specialize=["T"])
def expand_partials(
    streams, y, more, post, comb, parts, partials, y_stride, more_stride, T,
    D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, DS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile of BM rows, slice of DS channels of all four streams): expands them in place,
    and gives their products with fn and sums of squares to `partials`."""
    split = tl.program_id(1)
    row_B = tl.program_id(0) * BM + tl.arange(0, BM)
    is_row_B = row_B < T
    wide_B = row_B.to(tl.int64)
    fn_at_Q, is_fn_Q = mix_columns(parts, 4 * D, M, BN, PARTS)
    acc_BQ = tl.zeros([BM, PARTS * BN], tl.float32)
    square_BK = tl.zeros([BM, BK], tl.float32)
    for step in range(0, DS, BK):
        d_K = split * DS + step + tl.arange(0, BK)
        mask_BK, fn_mask = is_row_B[:, None], is_fn_Q[None, :]
        if not EVEN:
            mask_BK = mask_BK & (d_K < D)[None, :]
            fn_mask = fn_mask & (d_K < D)[:, None]
        at_BK = streams + wide_B[:, None] * (4 * D) + d_K[None, :]
        # All is read before any of it is overwritten.
        x0_BK = tl.load(at_BK, mask=mask_BK, other=0.0).to(tl.float32)
        x1_BK = tl.load(at_BK + D, mask=mask_BK, other=0.0).to(tl.float32)
        x2_BK = tl.load(at_BK + 2 * D, mask=mask_BK, other=0.0).to(tl.float32)
        x3_BK = tl.load(at_BK + 3 * D, mask=mask_BK, other=0.0).to(tl.float32)
        y_at_BK = y + wide_B[:, None] * y_stride + d_K[None, :]
        y_BK = tl.load(y_at_BK, mask=mask_BK, other=0.0).to(tl.float32)
        if more is not None:
            more_at_BK = more + wide_B[:, None] * more_stride + d_K[None, :]
            y_BK += tl.load(more_at_BK, mask=mask_BK, other=0.0).to(tl.float32)
        for j in tl.static_range(4):
            comb_at_B = comb + wide_B * 16 + j
            out_BK = x0_BK * tl.load(comb_at_B, mask=is_row_B, other=0.0)[:, None]
            out_BK += x1_BK * tl.load(comb_at_B + 4, mask=is_row_B, other=0.0)[:, None]
            out_BK += x2_BK * tl.load(comb_at_B + 8, mask=is_row_B, other=0.0)[:, None]
            out_BK += x3_BK * tl.load(comb_at_B + 12, mask=is_row_B, other=0.0)[:, None]
            post_B = tl.load(post + wide_B * 4 + j, mask=is_row_B, other=0.0)
            out_BK = rounded(out_BK + post_B[:, None] * y_BK, streams)
            kept_BK = out_BK.to(streams.dtype.element_ty)
            tl.store(at_BK + j * D, kept_BK, mask=mask_BK)
            square_BK += out_BK * out_BK
            fn_at_KQ = fn_at_Q[None, :] + (j * D + d_K)[:, None]
            fn_KQ = tl.load(fn_at_KQ, mask=fn_mask, other=0.0)
            acc_BQ = mix_products(kept_BK, fn_KQ, acc_BQ, T, UPCAST)
    n_N = tl.arange(0, BN)
    out_BN = sum_of_parts(acc_BQ, BM, BN, PARTS)
    out_BN = tl.where(n_N[None, :] == M, tl.sum(square_BK, 1)[:, None], out_BN)
    at_BN = partials + (wide_B * SPLITS + split)[:, None] * BN + n_N[None, :]
    tl.store(at_BN, out_BN, mask=is_row_B[:, None] & (n_N <= M)[None, :])


@triton.jit
def _softmax(at, eps):
    """Of four numbers in memory, and eps."""
    a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    inverse = 1.0 / ((a + b) + (c + d))
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _finish_row(
    partials, base, post, comb, row, norm_eps, eps,
    ITERATIONS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """post and comb of one row. Each thread does all rounds by itself: sixteen numbers fit, and
    nothing is handed from thread to thread 39 times."""
    p_P, n_N = tl.arange(0, BP), tl.arange(0, BN)
    at_PN = partials + (row * SPLITS + p_P)[:, None] * BN + n_N[None, :]
    # Columns behind the sum of squares were never written.
    is_PN = (p_P < SPLITS)[:, None] & (n_N <= M)[None, :]
    sum_N = tl.sum(tl.load(at_PN, mask=is_PN, other=0.0), 0)
    base_N = tl.load(base + n_N, mask=n_N < M, other=0.0)
    square = tl.sum(tl.where(n_N == M, sum_N, 0.0), 0)
    m_N = sum_N * tl.rsqrt(square / K + norm_eps) + base_N
    is_post_N = (n_N >= 4) & (n_N < 8)
    tl.store(post + row * 4 + n_N - 4, 2 * tl.sigmoid(m_N), mask=is_post_N)
    at = comb + row * 16
    tl.store(at + n_N - 8, m_N, mask=(n_N >= 8) & (n_N < 24))
    tl.debug_barrier()
    a0, a1, a2, a3 = _softmax(at, eps)
    b0, b1, b2, b3 = _softmax(at + 4, eps)
    c0, c1, c2, c3 = _softmax(at + 8, eps)
    d0, d1, d2, d3 = _softmax(at + 12, eps)
    tl.debug_barrier()
    # After any round the matrix is r[i] comb[i, j] c[j]; v and w are 1 / r and 1 / c.
    r0, r1, r2, r3 = 1.0, 1.0, 1.0, 1.0
    v0, v1, v2, v3 = 1.0, 1.0, 1.0, 1.0
    w0 = _weighed(a0, b0, c0, d0, r0, r1, r2, r3, eps)
    w1 = _weighed(a1, b1, c1, d1, r0, r1, r2, r3, eps)
    w2 = _weighed(a2, b2, c2, d2, r0, r1, r2, r3, eps)
    w3 = _weighed(a3, b3, c3, d3, r0, r1, r2, r3, eps)
    for _ in range(ITERATIONS - 1):
        k0, k1, k2, k3 = 1.0 / w0, 1.0 / w1, 1.0 / w2, 1.0 / w3
        v0 = _weighed(a0, a1, a2, a3, k0, k1, k2, k3, eps * v0)
        v1 = _weighed(b0, b1, b2, b3, k0, k1, k2, k3, eps * v1)
        v2 = _weighed(c0, c1, c2, c3, k0, k1, k2, k3, eps * v2)
        v3 = _weighed(d0, d1, d2, d3, k0, k1, k2, k3, eps * v3)
        r0, r1, r2, r3 = 1.0 / v0, 1.0 / v1, 1.0 / v2, 1.0 / v3
        w0 = _weighed(a0, b0, c0, d0, r0, r1, r2, r3, eps * w0)
        w1 = _weighed(a1, b1, c1, d1, r0, r1, r2, r3, eps * w1)
        w2 = _weighed(a2, b2, c2, d2, r0, r1, r2, r3, eps * w2)
        w3 = _weighed(a3, b3, c3, d3, r0, r1, r2, r3, eps * w3)
    k0, k1, k2, k3 = 1.0 / w0, 1.0 / w1, 1.0 / w2, 1.0 / w3
    _store_four(at, a0 * r0 * k0, a1 * r0 * k1, a2 * r0 * k2, a3 * r0 * k3)
    _store_four(at + 4, b0 * r1 * k0, b1 * r1 * k1, b2 * r1 * k2, b3 * r1 * k3)
    _store_four(at + 8, c0 * r2 * k0, c1 * r2 * k1, c2 * r2 * k2, c3 * r2 * k3)
    _store_four(at + 12, d0 * r3 * k0, d1 * r3 * k1, d2 * r3 * k2, d3 * r3 * k3)


@triton.jit
def _weighed(a, b, c, d, x, y, z, w, rest):
    return ((a * x + b * y) + (c * z + d * w)) + rest


@triton.jit
def _store_four(at, a, b, c, d):
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)


@triton.jit(do_not_specialize=["T"])
def finish_fp8(
    streams, partials, base, norm_weight, codes, scales, x, post, comb, T, norm_eps, eps,
    ITERATIONS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    SPLITS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr,
):  # fmt: skip
    """The first T programs finish the mixes of a row each, the others make its rows of codes."""
    pid = tl.program_id(0)
    if pid < T:
        _finish_row(
            partials, base, post, comb, pid.to(tl.int64), norm_eps, eps,
            ITERATIONS, 4 * D, M, SPLITS, BP, BN,
        )  # fmt: skip
    else:
        row_1 = (pid - T + tl.arange(0, 1)).to(tl.int64)
        s_S, d_D = tl.arange(0, 4), tl.arange(0, BD)
        # All is on its way before the first sum waits.
        x_at_1SD = streams + (row_1 * (4 * D))[:, None, None] + (s_S * D)[None, :, None]
        is_D = d_D < D
        x_1SD = tl.load(x_at_1SD + d_D[None, None, :], mask=is_D[None, None, :], other=0.0)
        weight_D = tl.load(norm_weight + d_D, mask=is_D, other=0.0)
        pre_1S = pre_of_rows(
            partials, base, row_1, row_1 < T, norm_eps, eps, 4, D, M, SPLITS, BP, BN
        )
        u_1D = tl.sum(x_1SD.to(tl.float32) * pre_1S[:, :, None], 1)
        u_1D = rounded(normed_rows(u_1D, weight_D, norm_eps, x, D), x)
        to_1D = row_1[:, None] * D + d_D[None, :]
        tl.store(x + to_1D, u_1D.to(x.dtype.element_ty), mask=is_D[None, :])
        codes_1GI, scale_1G = e4m3_groups(u_1D, 1, BD, GROUP)
        tl.store(codes + to_1D, tl.reshape(codes_1GI, (1, BD)), mask=is_D[None, :])
        g_G = tl.arange(0, BD // GROUP)
        kept_1G = scale_1G.to(tl.uint8) if E8M0 else e8m0_to_float(scale_1G)
        to_1G = scales + row_1[:, None] * (D // GROUP) + g_G[None, :]
        tl.store(to_1G, kept_1G, mask=(g_G < D // GROUP)[None, :])


def steps(
    launch: Launcher,
    case: ExpandMixFp8Case,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor | None,
    post_TS: torch.Tensor | None,
    comb_TSS: torch.Tensor | None,
    more_TD: torch.Tensor | None = None,
) -> Tensors:
    hyper = case.hyper
    if y_TD is not None:
        assert post_TS is not None and comb_TSS is not None
        streams_TSD = hc_rows.expand(launch, hyper, streams_TSD, y_TD, post_TS, comb_TSS, more_TD)
    u_TD, post_TS, comb_TSS = hc.mix(launch, hyper, weights.without_norm(), streams_TSD)
    normed = norm.rms_norm_fp8(launch, case.norm, u_TD, None, weights.norm_weight_D)
    return *normed, streams_TSD, post_TS, comb_TSS


def expand_mix_fp8(
    launch: Launcher,
    case: ExpandMixFp8Case,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor | None,
    post_TS: torch.Tensor | None,
    comb_TSS: torch.Tensor | None,
    more_TD: torch.Tensor | None = None,
) -> Tensors:
    rows, hyper = len(streams_TSD), case.hyper
    if rows > hc.FEW_ROWS:
        return steps(launch, case, weights, streams_TSD, y_TD, post_TS, comb_TSS, more_TD)
    if y_TD is None:
        partials_TPN = hc.partials(launch, hyper, weights, streams_TSD)
    else:
        assert post_TS is not None and comb_TSS is not None
        before = y_TD, more_TD, post_TS.contiguous(), comb_TSS.contiguous()
        partials_TPN = _expanded(launch, case, weights, streams_TSD, *before)
    x_TD, post_TS, comb_TSS = hc.results_of(hyper, streams_TSD)
    codes_TD = x_TD.new_empty(x_TD.shape, dtype=torch.uint8)
    kept = torch.uint8 if case.scale == "e8m0" else torch.float32
    scales_TG = x_TD.new_empty((rows, hyper.width // case.group), dtype=kept)
    splits, columns = partials_TPN.shape[1:]
    launch(
        finish_fp8,
        (2 * rows,),
        streams_TSD,
        partials_TPN,
        weights.base_M,
        weights.norm_weight_D,
        codes_TD,
        scales_TG,
        x_TD,
        post_TS,
        comb_TSS,
        rows,
        hyper.norm_eps,
        hyper.eps,
        num_warps=warps_of(hyper),
        ITERATIONS=hyper.iterations,
        D=hyper.width,
        BD=next_power_of_2(hyper.width),
        M=hyper.mixes,
        SPLITS=splits,
        BP=next_power_of_2(splits),
        BN=columns,
        GROUP=case.group,
        E8M0=case.scale == "e8m0",
    )
    return codes_TD, scales_TG, x_TD, streams_TSD, post_TS, comb_TSS


def _expanded(
    launch: Launcher,
    case: ExpandMixFp8Case,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor,
    more_TD: torch.Tensor | None,
    post_TS: torch.Tensor,
    comb_TSS: torch.Tensor,
) -> torch.Tensor:
    """Expands in place; returns the partials, as `hc.partials` does."""
    rows, hyper = len(streams_TSD), case.hyper
    step = hc.step_of(hyper, _STEP)
    tiles = hc.tiles_of(rows, hyper.width, step, hc.SLICES, _STREAMS)
    height = min(tiles.rows, _MOST_ROWS)
    columns = hc.columns_of(hyper.mixes, 1)
    partials_TPN = streams_TSD.new_empty(rows, tiles.splits, columns, dtype=torch.float32)
    launch(
        expand_partials,
        (cdiv(rows, height), tiles.splits),
        streams_TSD,
        y_TD,
        more_TD,
        post_TS,
        comb_TSS,
        weights.parts_PMK,
        partials_TPN,
        y_TD.stride(0),
        0 if more_TD is None else more_TD.stride(0),
        rows,
        num_warps=tiles.warps if height <= 16 else 2 * tiles.warps,
        num_stages=tiles.stages,
        D=hyper.width,
        M=hyper.mixes,
        SPLITS=tiles.splits,
        DS=tiles.slice,
        EVEN=tiles.even,
        BM=height,
        BN=columns,
        BK=tiles.channels,
        PARTS=len(weights.parts_PMK),
        UPCAST=launch.interpreted,
    )
    return partials_TPN


def prepare(
    case: ExpandMixFp8Case,
    fn_MK: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    norm_weight_D: torch.Tensor,
) -> Mixes:
    return hc.prepare_mix(case.hyper, fn_MK, base_M, scale_3, norm_weight_D)


def steps_eligible(case: ExpandMixFp8Case, target: Target) -> Verdict:
    return hc.whole_streams(case.hyper, target)


def eligible(case: ExpandMixFp8Case, target: Target) -> Verdict:
    if case.hyper.streams != _STREAMS:
        return no(f"holds {_STREAMS} streams in registers, not {case.hyper.streams}")
    return on_gpu(case, target)


BACKENDS = (
    Declared("hc.expand_mix_fp8", expand_mix_fp8, eligible, prepare),
    Declared("hc.expand_mix_fp8", steps, steps_eligible, prepare, STEPS),
)
