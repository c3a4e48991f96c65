"""Hyper-connections: one product per row for all mixes, and Sinkhorn's rounds with few calls."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.cpu.norm import inverse_rms
from metainfer.kernels.cpu.tiles import is_one_tile, row_tiles
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.ops.hc import HyperCase

# Up to here the rounds of all rows are products with one small matrix.
_FEW_STREAMS = 64


class Mixes(NamedTuple):
    """fp32: fn of the contract times its scales, transposed, [K, M]; base [M]; norm_eps []."""

    fn_KM: torch.Tensor
    base_M: torch.Tensor
    norm_eps: torch.Tensor


def prepare_mix(
    case: HyperCase, fn_MK: torch.Tensor, base_M: torch.Tensor, scale_3: torch.Tensor
) -> Mixes:
    counts = torch.tensor([case.streams, case.streams, case.streams**2])
    return _mixes(case, fn_MK, base_M, scale_3.repeat_interleave(counts))


def prepare_head(
    case: HyperCase, fn_SK: torch.Tensor, base_S: torch.Tensor, scale_1: torch.Tensor
) -> Mixes:
    return _mixes(case, fn_SK, base_S, scale_1)


def _mixes(
    case: HyperCase, fn_MK: torch.Tensor, base_M: torch.Tensor, scale_M: torch.Tensor
) -> Mixes:
    fn_KM = (fn_MK * scale_M.unsqueeze(1)).T.contiguous()
    return Mixes(fn_KM, base_M, torch.tensor(case.norm_eps))


def mix(
    case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u_TD, m_TM = _collapse(case, weights, streams_TSD)
    streams = case.streams
    post_TS = m_TM[:, streams : 2 * streams].sigmoid().mul_(2)
    comb_TSS = m_TM[:, 2 * streams :].unflatten(1, (streams, streams)).softmax(-1).add_(case.eps)
    return u_TD, post_TS, _sinkhorn(case, comb_TSS)


def head(case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor) -> torch.Tensor:
    return _collapse(case, weights, streams_TSD)[0]


def _collapse(
    case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The streams, added with weights pre, in the case's dtype, and fn z * scale + base [T, M], of
    which the first S numbers make pre."""
    rows, row_elements = len(streams_TSD), case.streams * case.width
    if is_one_tile(rows, row_elements):
        u_TD, m_TM = _collapse_tile(case, weights, streams_TSD)
        return u_TD.to(TORCH_DTYPES[case.dtype]), m_TM
    u_TD = torch.empty(rows, case.width, dtype=TORCH_DTYPES[case.dtype])
    m_TM = torch.empty(rows, len(weights.base_M))
    for tile in row_tiles(rows, row_elements):
        u_TD[tile], m_TM[tile] = _collapse_tile(case, weights, streams_TSD[tile])
    return u_TD, m_TM


def _collapse_tile(
    case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, all in fp32."""
    streams_TSD = streams_TSD.float()
    x_TK = streams_TSD.flatten(1)
    inverse_T1 = inverse_rms(x_TK, weights.norm_eps)
    m_TM = torch.addcmul(weights.base_M, x_TK @ weights.fn_KM, inverse_T1)
    pre_TS = m_TM[:, : case.streams].sigmoid().add_(case.eps)
    return torch.bmm(pre_TS.unsqueeze(1), streams_TSD).squeeze(1), m_TM


def _sinkhorn(case: HyperCase, comb_TSS: torch.Tensor) -> torch.Tensor:
    """The contract's rounds, from the first division by column sums on."""
    few = comb_TSS.shape[0] * case.streams <= _FEW_STREAMS
    # One product holds the combs of all rows, in which a NaN would reach them all.
    if few and math.isfinite(comb_TSS.sum().item()):
        return _scaled_by_vectors(case, comb_TSS)
    comb_SST = comb_TSS.permute(1, 2, 0).contiguous()
    for half in range(2 * case.iterations - 1):
        comb_SST /= comb_SST.sum(half % 2, keepdim=True).add_(case.eps)
    return comb_SST.permute(2, 0, 1).contiguous()


def _scaled_by_vectors(case: HyperCase, comb_TSS: torch.Tensor) -> torch.Tensor:
    """The same, for few rows.

    After any round the matrix is r[i] comb[i, j] c[j]. Dividing by (column sums + eps) makes
    1 / c[j] into eps / c[j] + sum over i of comb[i, j] r[i], and likewise for rows: a product of
    [combs of all rows on the diagonal | eps on the diagonal] with [r | 1 / c].
    """
    rows, streams = comb_TSS.shape[:2]
    size = rows * streams
    matrices = np.zeros((2, size, 2 * size), np.float32)
    matrices.reshape(2, -1)[:, size :: 2 * size + 1] = case.eps
    by_column, by_row = matrices
    for first, comb in zip(range(0, size, streams), comb_TSS.numpy(), strict=True):
        place = slice(first, first + streams)
        by_column[place, place], by_row[place, place] = comb.T, comb
    # Two of each vector: one is read while the other is written.
    of_rows, of_columns = np.ones((2, 2, 2 * size), np.float32)
    (r, inverse_c), (c, inverse_r) = (
        zip(*((vector[:size], vector[size:]) for vector in pair), strict=True)
        for pair in (of_rows, of_columns)
    )
    for turn in range(case.iterations):
        now, then = turn % 2, 1 - turn % 2
        if turn > 0:
            np.reciprocal(by_row.dot(of_columns[then], inverse_r[now]), r[now])
        np.reciprocal(by_column.dot(of_rows[now], inverse_c[then]), c[now])
    r_TS1 = torch.from_numpy(r[now]).view(rows, streams, 1)
    c_T1S = torch.from_numpy(c[now]).view(rows, 1, streams)
    return comb_TSS.mul_(r_TS1).mul_(c_T1S)


def expand(
    case: HyperCase,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor,
    post_TS: torch.Tensor,
    comb_TSS: torch.Tensor,
    more_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    if more_TD is not None:
        y_TD = y_TD.float() + more_TD
    if is_one_tile(len(streams_TSD), case.streams * case.width):
        return _expand(streams_TSD, y_TD, post_TS, comb_TSS).to(streams_TSD.dtype)
    for tile in row_tiles(len(streams_TSD), case.streams * case.width):
        streams_TSD[tile] = _expand(streams_TSD[tile], y_TD[tile], post_TS[tile], comb_TSS[tile])
    return streams_TSD


def _expand(
    streams_TSD: torch.Tensor, y_TD: torch.Tensor, post_TS: torch.Tensor, comb_TSS: torch.Tensor
) -> torch.Tensor:
    """New, in fp32."""
    added_TSD = post_TS.unsqueeze(2) * y_TD.unsqueeze(1)
    # Products of many small matrices are slow where their strides are unusual.
    return torch.baddbmm(added_TSD, comb_TSS.contiguous().transpose(1, 2), streams_TSD.float())


BACKENDS = (
    cpu_backend("hc.mix", mix, prepare_mix),
    cpu_backend("hc.expand", expand),
    cpu_backend("hc.head", head, prepare_head),
)
