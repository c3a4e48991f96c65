"""What hyper-connections do to each row alone, in Triton: expand, and collapse with given weights.

Both read and write every number once. Shape suffixes: R rows, S streams, D channels of
a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.hc_mix import normed_rows
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.kernels.triton.rows import rounded
from metainfer.ops.hc import HyperCase

_CHANNELS = 1024  # of a row that one program expands


@triton.jit(do_not_specialize=["T"])
def expand_rows(
    streams, y, more, post, comb, y_stride, more_stride, T,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program (R rows, BD channels), in place."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    s_S, d_D = tl.arange(0, S), tl.program_id(1) * BD + tl.arange(0, BD)
    wide_R = row_R.to(tl.int64)
    mask_R = row_R < T
    mask_RD = mask_R[:, None] & (d_D < D)[None, :]
    to_RD = streams + (wide_R * (S * D))[:, None] + d_D[None, :]
    x_at_RSD = to_RD[:, None, :] + (s_S * D)[None, :, None]
    x_RSD = tl.load(x_at_RSD, mask=mask_RD[:, None, :], other=0.0).to(tl.float32)
    y_at_RD = y + wide_R[:, None] * y_stride + d_D[None, :]
    y_RD = tl.load(y_at_RD, mask=mask_RD, other=0.0).to(tl.float32)
    if more is not None:
        more_at_RD = more + wide_R[:, None] * more_stride + d_D[None, :]
        y_RD += tl.load(more_at_RD, mask=mask_RD, other=0.0).to(tl.float32)
    for j in tl.static_range(S):
        comb_at_RS = comb + wide_R[:, None] * (S * S) + (s_S * S + j)[None, :]
        comb_RS = tl.load(comb_at_RS, mask=mask_R[:, None], other=0.0)
        post_R = tl.load(post + wide_R * S + j, mask=mask_R, other=0.0)
        out_RD = tl.sum(x_RSD * comb_RS[:, :, None], 1) + post_R[:, None] * y_RD
        out_RD = rounded(out_RD, streams)
        tl.store(to_RD + j * D, out_RD.to(streams.dtype.element_ty), mask=mask_RD)


@triton.jit(do_not_specialize=["T"])
def collapse_given(
    streams, given, norm_weight, u, norm_eps, T,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (R rows)."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    s_S, d_D = tl.arange(0, S), tl.arange(0, BD)
    wide_R = row_R.to(tl.int64)
    mask_RD = (row_R < T)[:, None] & (d_D < D)[None, :]
    x_at_RSD = streams + (wide_R * (S * D))[:, None, None] + (s_S * D)[None, :, None]
    x_RSD = tl.load(x_at_RSD + d_D[None, None, :], mask=mask_RD[:, None, :], other=0.0)
    given_at_RS = given + wide_R[:, None] * S + s_S[None, :]
    given_RS = tl.load(given_at_RS, mask=(row_R < T)[:, None], other=0.0)
    if NORM:
        weight_D = tl.load(norm_weight + d_D, mask=d_D < D, other=0.0)
    u_RD = tl.sum(x_RSD.to(tl.float32) * given_RS[:, :, None], 1)
    if NORM:
        u_RD = normed_rows(u_RD, weight_D, norm_eps, u, D)
    to_RD = u + wide_R[:, None] * D + d_D[None, :]
    tl.store(to_RD, u_RD.to(u.dtype.element_ty), mask=mask_RD)


def rows_of(case: HyperCase) -> int:
    """Rows that one program holds with all their streams."""
    return max(1, 1024 // next_power_of_2(case.width))


def warps_of(case: HyperCase) -> int:
    """Warps that hold so many rows in registers."""
    return 8 if case.streams * case.width > 4096 else 4


def expand(
    launch: Launcher,
    case: HyperCase,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor,
    post_TS: torch.Tensor,
    comb_TSS: torch.Tensor,
    more_TD: torch.Tensor | None = None,
    channels: int = _CHANNELS,
    warps: int = 4,
) -> torch.Tensor:
    """`channels` and `warps` of a program for experiments."""
    rows, height = len(streams_TSD), rows_of(case)
    channels = min(channels, next_power_of_2(case.width))
    launch(
        expand_rows,
        (cdiv(rows, height), cdiv(case.width, channels)),
        streams_TSD,
        y_TD,
        more_TD,
        post_TS.contiguous(),
        comb_TSS.contiguous(),
        y_TD.stride(0),
        0 if more_TD is None else more_TD.stride(0),
        rows,
        num_warps=warps,
        R=height,
        S=case.streams,
        D=case.width,
        BD=channels,
    )
    return streams_TSD


def prepare_collapse(case: HyperCase, norm_weight_D: torch.Tensor | None) -> torch.Tensor | None:
    return norm_weight_D


def collapse(
    launch: Launcher,
    case: HyperCase,
    norm_weight_D: torch.Tensor | None,
    streams_TSD: torch.Tensor,
    given_TS: torch.Tensor,
) -> torch.Tensor:
    rows, height = len(streams_TSD), rows_of(case)
    u_TD = streams_TSD.new_empty(rows, case.width, dtype=TORCH_DTYPES[case.dtype])
    launch(
        collapse_given,
        (cdiv(rows, height),),
        streams_TSD,
        given_TS.contiguous(),
        norm_weight_D,
        u_TD,
        case.norm_eps,
        rows,
        num_warps=warps_of(case),
        R=height,
        S=case.streams,
        D=case.width,
        BD=next_power_of_2(case.width),
        NORM=case.normed,
    )
    return u_TD
