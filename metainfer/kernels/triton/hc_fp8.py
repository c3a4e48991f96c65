"""hc.expand_mix_fp8 in Triton: one sublayer's output into the streams, and the next one's rows.

Of many rows the four kernels of `hc.expand`, `hc.mix` and `norm.rms_norm_fp8`, one after the other
(of few too, as the variant "steps"). Of few rows, two launches. The first expands its channels of
all streams and multiplies what it has just made with fn; the second adds the slices up, does
Sinkhorn's rounds in one program a row and, in another, collapses, norms and rounds the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Variant, Verdict
from metainfer.kernels.triton import hc, hc_rows, norm
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.codes import e4m3_groups, e8m0_to_float
from metainfer.kernels.triton.hc import Mixes
from metainfer.kernels.triton.hc_mix import (
    mix_columns,
    mix_products,
    normed_rows,
    sum_of_parts,
)
from metainfer.kernels.triton.hc_one_row import collapsed_row, finish_row
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.kernels.triton.rows import rounded
from metainfer.ops.base import Target
from metainfer.ops.hc import ExpandMixFp8Case

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_STREAMS = 4  # that a program holds in registers
_STEP = 32  # channels of all streams that are expanded and multiplied at a time
_MOST_ROWS = 32  # of a tile: more do not fit in registers
# Of a program that finishes a row. Width 4,096 took 4 warps 3.3 us on an H200, 8 4.1 and 16 6.1.
_LEAST_WARPS, _WARP_CHANNELS = 4, 1024

Tensors = tuple[torch.Tensor, ...]


@triton.jit
def _as_it_lies(x):
    """The same numbers. The compiler would rather compute them a second time where the product
    wants them, and hand all that they are made of from thread to thread; this goes one way."""
    if _INTERPRETED:
        return x
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, False, 2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, False, 1)


@triton.jit(do_not_specialize=["T"])
def expand_partials(
    streams, y, more, post, comb, parts, partials, y_stride, more_stride, T,
    D: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, DS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile of BM rows, slice of DS channels of all four streams): expands them in place,
    and gives their products with fn and sums of squares to `partials`.

    J are the streams that are written; a step's channels of all of them are one operand."""
    split = tl.program_id(1)
    row_B, j_J = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 4)
    is_row_B, wide_B = row_B < T, row_B.to(tl.int64)
    fn_at_Q, is_fn_Q = mix_columns(parts, 4 * D, M, BN, PARTS)
    q_KQ = tl.arange(0, 4 * BK)
    acc_BQ = tl.zeros([BM, PARTS * BN], tl.float32)
    square_BJK = tl.zeros([BM, 4, BK], tl.float32)
    # A program of few rows waits for memory once: nothing is read after the first store, which the
    # compiler could not move before it.
    at_BJ, is_BJ = comb + wide_B[:, None] * 16 + j_J[None, :], is_row_B[:, None]
    comb0_BJ = tl.load(at_BJ, mask=is_BJ, other=0.0)
    comb1_BJ = tl.load(at_BJ + 4, mask=is_BJ, other=0.0)
    comb2_BJ = tl.load(at_BJ + 8, mask=is_BJ, other=0.0)
    comb3_BJ = tl.load(at_BJ + 12, mask=is_BJ, other=0.0)
    post_BJ = tl.load(post + wide_B[:, None] * 4 + j_J[None, :], mask=is_BJ, other=0.0)
    for step in range(0, DS, BK):
        d_K = split * DS + step + tl.arange(0, BK)
        mask_B1K, fn_mask = is_row_B[:, None, None], is_fn_Q[None, :]
        fn_d_K = split * DS + step + q_KQ % BK
        if not EVEN:
            mask_B1K = mask_B1K & (d_K < D)[None, None, :]
            fn_mask = fn_mask & (fn_d_K < D)[:, None]
        fn_at_K = q_KQ // BK * D + fn_d_K
        fn_KQ = tl.load(fn_at_Q[None, :] + fn_at_K[:, None], mask=fn_mask, other=0.0)
        # Each written stream reads all four by itself, so that no thread waits for another.
        none_J = (j_J * 0)[None, :, None]
        at_BJK = streams + (wide_B * (4 * D))[:, None, None] + none_J + d_K[None, None, :]
        mask_BJK = mask_B1K & (none_J == 0)
        x0_BJK = tl.load(at_BJK, mask=mask_BJK, other=0.0).to(tl.float32)
        x1_BJK = tl.load(at_BJK + D, mask=mask_BJK, other=0.0).to(tl.float32)
        x2_BJK = tl.load(at_BJK + 2 * D, mask=mask_BJK, other=0.0).to(tl.float32)
        x3_BJK = tl.load(at_BJK + 3 * D, mask=mask_BJK, other=0.0).to(tl.float32)
        y_at_BJK = y + (wide_B * y_stride)[:, None, None] + none_J + d_K[None, None, :]
        y_BJK = tl.load(y_at_BJK, mask=mask_BJK, other=0.0).to(tl.float32)
        if more is not None:
            more_at_BJK = more + (wide_B * more_stride)[:, None, None] + none_J + d_K[None, None, :]
            y_BJK += tl.load(more_at_BJK, mask=mask_BJK, other=0.0).to(tl.float32)
        # Every thread has read before any writes.
        tl.debug_barrier()
        out_BJK = x0_BJK * comb0_BJ[:, :, None] + x1_BJK * comb1_BJ[:, :, None]
        out_BJK += x2_BJK * comb2_BJ[:, :, None]
        out_BJK += x3_BJK * comb3_BJ[:, :, None]
        out_BJK = rounded(out_BJK + post_BJ[:, :, None] * y_BJK, streams)
        kept_BJK = out_BJK.to(streams.dtype.element_ty)
        tl.store(at_BJK + (j_J * D)[None, :, None], kept_BJK, mask=mask_BJK)
        square_BJK += out_BJK * out_BJK
        kept_BJK = _as_it_lies(kept_BJK)
        acc_BQ = mix_products(tl.reshape(kept_BJK, [BM, 4 * BK]), fn_KQ, acc_BQ, T, UPCAST)
    n_N = tl.arange(0, BN)
    out_BN = sum_of_parts(acc_BQ, BM, BN, PARTS)
    square_B = tl.sum(tl.reshape(square_BJK, [BM, 4 * BK]), 1)
    out_BN = tl.where(n_N[None, :] == M, square_B[:, None], out_BN)
    at_BN = partials + (wide_B * SPLITS + split)[:, None] * BN + n_N[None, :]
    tl.store(at_BN, out_BN, mask=is_row_B[:, None] & (n_N <= M)[None, :])


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
        finish_row(
            partials, base, post, comb, pid.to(tl.int64), norm_eps, eps,
            ITERATIONS, 4 * D, M, SPLITS, BP, BN,
        )  # fmt: skip
    else:
        row, d_D = (pid - T).to(tl.int64), tl.arange(0, BD)
        weight_D = tl.load(norm_weight + d_D, mask=d_D < D, other=0.0)
        u_1D = collapsed_row(streams, partials, base, row, norm_eps, eps, D, BD, M, SPLITS, BP, BN)
        u_1D = rounded(normed_rows(u_1D, weight_D, norm_eps, x, D), x)
        to_1D = row * D + d_D[None, :]
        tl.store(x + to_1D, u_1D.to(x.dtype.element_ty), mask=(d_D < D)[None, :])
        codes_1GI, scale_1G = e4m3_groups(u_1D, 1, BD, GROUP)
        tl.store(codes + to_1D, tl.reshape(codes_1GI, (1, BD)), mask=(d_D < D)[None, :])
        g_G = tl.arange(0, BD // GROUP)
        kept_1G = scale_1G.to(tl.uint8) if E8M0 else e8m0_to_float(scale_1G)
        to_1G = scales + row * (D // GROUP) + g_G[None, :]
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
    if rows > hc.FEW_ROWS or hyper.streams != _STREAMS:
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
        num_warps=max(_LEAST_WARPS, next_power_of_2(hyper.width) // _WARP_CHANNELS),
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


def eligible(case: ExpandMixFp8Case, target: Target) -> Verdict:
    return hc.whole_streams(case.hyper, target)


BACKENDS = (
    Declared(
        "hc.expand_mix_fp8",
        expand_mix_fp8,
        eligible,
        prepare,
        variants={"steps": Variant(steps, hc.FEW_ROWS)},
    ),
)
