"""Hyper-connections, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.norm import rms, rms_norm_fp8
from metainfer.kernels.registry import Backend
from metainfer.ops.hc import ExpandMixFp8Case, HyperCase
from metainfer.ops.kernel_order import REFERENCE

Tensors = tuple[torch.Tensor, ...]


def mix(
    case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pre_TS, post_TS, comb_TSS = _mixes(case, weights, streams_TSD)
    return _collapsed(case, streams_TSD, pre_TS), post_TS, comb_TSS


def mix_norm(
    case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pre_TS, post_TS, comb_TSS = _mixes(case, weights[:3], streams_TSD)
    u_TD = _collapsed(case, streams_TSD, pre_TS)
    return _normed(case, u_TD, weights[3]), post_TS, comb_TSS


def mix_shifted(
    case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor, given_TS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mixes = _mixes(case, weights[:3], streams_TSD)
    return collapse(case, weights[3:], streams_TSD, given_TS), *mixes


def collapse(
    case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor, given_TS: torch.Tensor
) -> torch.Tensor:
    u_TD = _collapsed(case, streams_TSD, given_TS)
    return _normed(case, u_TD, weights[0]) if case.normed else u_TD


def _mixes(
    case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre_TS, post_TS, comb_TSS."""
    fn_MK, base_M, scale_3 = weights
    streams = case.streams
    sizes = [streams, streams, streams * streams]
    m_TM = rms(streams_TSD.flatten(1), case.norm_eps) @ fn_MK.T
    pre, post, comb = (
        part * scale + base
        for part, scale, base in zip(
            m_TM.split(sizes, dim=-1), scale_3, base_M.split(sizes), strict=True
        )
    )
    comb_TSS = comb.unflatten(-1, (streams, streams)).softmax(-1) + case.eps
    comb_TSS = comb_TSS / (comb_TSS.sum(-2, keepdim=True) + case.eps)
    for _ in range(case.iterations - 1):
        comb_TSS = comb_TSS / (comb_TSS.sum(-1, keepdim=True) + case.eps)
        comb_TSS = comb_TSS / (comb_TSS.sum(-2, keepdim=True) + case.eps)
    return pre.sigmoid() + case.eps, 2 * post.sigmoid(), comb_TSS


def _collapsed(case: HyperCase, streams_TSD: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
    u_TD = torch.einsum("ts,tsd->td", pre_TS, streams_TSD.float())
    return u_TD.to(TORCH_DTYPES[case.dtype])


def _normed(case: HyperCase, u_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return (rms(u_TD, case.norm_eps) * weight_D).to(u_TD.dtype)


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
    mixed_TSD = torch.einsum("tij,tid->tjd", comb_TSS, streams_TSD.float())
    added_TSD = post_TS[:, :, None] * y_TD.float()[:, None, :]
    return (mixed_TSD + added_TSD).to(streams_TSD.dtype)


def head(case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor) -> torch.Tensor:
    fn_SK, base_S, scale_1 = weights
    m_TS = rms(streams_TSD.flatten(1), case.norm_eps) @ fn_SK.T
    pre_TS = (m_TS * scale_1 + base_S).sigmoid() + case.eps
    return _collapsed(case, streams_TSD, pre_TS)


def expand_mix_fp8(
    case: ExpandMixFp8Case,
    weights: Tensors,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor | None,
    post_TS: torch.Tensor | None,
    comb_TSS: torch.Tensor | None,
    more_TD: torch.Tensor | None = None,
) -> Tensors:
    if y_TD is not None:
        assert post_TS is not None and comb_TSS is not None
        streams_TSD = expand(case.hyper, streams_TSD, y_TD, post_TS, comb_TSS, more_TD)
    u_TD, post_TS, comb_TSS = mix(case.hyper, weights[:3], streams_TSD)
    return *rms_norm_fp8(case.norm, u_TD, None, weights[3]), streams_TSD, post_TS, comb_TSS


BACKENDS = (
    Backend("hc.mix", REFERENCE, mix),
    Backend("hc.mix_norm", REFERENCE, mix_norm),
    Backend("hc.mix_shifted", REFERENCE, mix_shifted),
    Backend("hc.expand", REFERENCE, expand),
    Backend("hc.collapse", REFERENCE, collapse),
    Backend("hc.head", REFERENCE, head),
    Backend("hc.expand_mix_fp8", REFERENCE, expand_mix_fp8),
)
