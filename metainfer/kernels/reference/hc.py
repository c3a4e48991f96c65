"""Hyper-connections, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.norm import rms
from metainfer.kernels.registry import Backend
from metainfer.ops.hc import HyperCase
from metainfer.ops.kernel_order import REFERENCE

Tensors = tuple[torch.Tensor, ...]


def mix(
    case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    pre_TS = pre.sigmoid() + case.eps
    post_TS = 2 * post.sigmoid()
    comb_TSS = comb.unflatten(-1, (streams, streams)).softmax(-1) + case.eps
    comb_TSS = comb_TSS / (comb_TSS.sum(-2, keepdim=True) + case.eps)
    for _ in range(case.iterations - 1):
        comb_TSS = comb_TSS / (comb_TSS.sum(-1, keepdim=True) + case.eps)
        comb_TSS = comb_TSS / (comb_TSS.sum(-2, keepdim=True) + case.eps)
    u_TD = torch.einsum("ts,tsd->td", pre_TS, streams_TSD.float())
    return u_TD.to(TORCH_DTYPES[case.dtype]), post_TS, comb_TSS


def expand(
    case: HyperCase,
    streams_TSD: torch.Tensor,
    y_TD: torch.Tensor,
    post_TS: torch.Tensor,
    comb_TSS: torch.Tensor,
) -> torch.Tensor:
    mixed_TSD = torch.einsum("tij,tid->tjd", comb_TSS, streams_TSD.float())
    added_TSD = post_TS[:, :, None] * y_TD.float()[:, None, :]
    return (mixed_TSD + added_TSD).to(streams_TSD.dtype)


def head(case: HyperCase, weights: Tensors, streams_TSD: torch.Tensor) -> torch.Tensor:
    fn_SK, base_S, scale_1 = weights
    m_TS = rms(streams_TSD.flatten(1), case.norm_eps) @ fn_SK.T
    pre_TS = (m_TS * scale_1 + base_S).sigmoid() + case.eps
    return torch.einsum("ts,tsd->td", pre_TS, streams_TSD.float()).to(TORCH_DTYPES[case.dtype])


BACKENDS = (
    Backend("hc.mix", REFERENCE, mix),
    Backend("hc.expand", REFERENCE, expand),
    Backend("hc.head", REFERENCE, head),
)
