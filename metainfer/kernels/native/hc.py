"""Hyper-connections of few rows."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu import hc as torch_hc
from metainfer.kernels.cpu.hc import Mixes
from metainfer.kernels.native.backend import FEW_ROWS, Native, is_bf16, require, small
from metainfer.kernels.native.library import Library
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.hc import HyperCase


def mix(
    library: Library, case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, streams = len(streams_TSD), case.streams
    if rows > FEW_ROWS:
        return torch_hc.mix(case, weights, streams_TSD)
    post_TS = torch.empty(rows, streams)
    comb_TSS = torch.empty(rows, streams, streams)
    u_TD = _mix(library, case, weights, streams_TSD, post_TS.data_ptr(), comb_TSS.data_ptr())
    return u_TD, post_TS, comb_TSS


def head(
    library: Library, case: HyperCase, weights: Mixes, streams_TSD: torch.Tensor
) -> torch.Tensor:
    if len(streams_TSD) > FEW_ROWS:
        return torch_hc.head(case, weights, streams_TSD)
    return _mix(library, case, weights, streams_TSD, None, None)


def _mix(
    library: Library,
    case: HyperCase,
    weights: Mixes,
    streams_TSD: torch.Tensor,
    post: int | None,
    comb: int | None,
) -> torch.Tensor:
    """u_TD; post and comb are written where their pointers are given."""
    u_TD = torch.empty(len(streams_TSD), case.width, dtype=TORCH_DTYPES[case.dtype])
    require(
        library.hc_mix(
            len(streams_TSD),
            case.streams,
            case.width,
            weights.base_M.shape[0],
            case.iterations,
            case.eps,
            case.norm_eps,
            weights.fn_KM.data_ptr(),
            weights.base_M.data_ptr(),
            streams_TSD.data_ptr(),
            is_bf16(streams_TSD),
            u_TD.data_ptr(),
            is_bf16(u_TD),
            post,
            comb,
        )
    )
    return u_TD


def expand(
    library: Library,
    case: HyperCase,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor,
    post_TS: torch.Tensor,
    comb_TSS: torch.Tensor,
    more_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    if more_TD is not None:
        y_TD = y_TD.float() + more_TD
    if len(streams_TSD) > FEW_ROWS:
        return torch_hc.expand(case, streams_TSD, y_TD, post_TS, comb_TSS)
    y_TD, post_TS, comb_TSS = y_TD.contiguous(), post_TS.contiguous(), comb_TSS.contiguous()
    require(
        library.hc_expand(
            len(streams_TSD),
            case.streams,
            case.width,
            streams_TSD.data_ptr(),
            is_bf16(streams_TSD),
            y_TD.data_ptr(),
            is_bf16(y_TD),
            post_TS.data_ptr(),
            comb_TSS.data_ptr(),
        )
    )
    return streams_TSD


def backends(native: Native) -> tuple[Backend, ...]:
    eligible = small(lambda case: (2 + case.streams) * case.streams**2 * case.width)
    return (
        native.backend("hc.mix", mix, torch_hc.prepare_mix, eligible),
        native.backend("hc.expand", expand, eligible=eligible),
        native.backend("hc.head", head, torch_hc.prepare_head, eligible),
    )
