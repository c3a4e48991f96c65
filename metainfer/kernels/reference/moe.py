"""Routing and experts, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.moe import ExpertsCase, RouteCase, SwigluCase

Tensors = tuple[torch.Tensor, ...]


def route_hash(
    case: RouteCase, weights: Tensors, x_TD: torch.Tensor, token_ids_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_ED, table_VK = weights
    return _weigh(case, _scores(gate_ED, x_TD), table_VK[token_ids_T])


def route_learned(
    case: RouteCase, weights: Tensors, x_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_ED, bias_E = weights
    scores_TE = _scores(gate_ED, x_TD)
    return _weigh(case, scores_TE, (scores_TE + bias_E).topk(case.selected, dim=-1).indices)


def _scores(gate_ED: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x_TD.float() @ gate_ED.float().T).sqrt()


def _weigh(
    case: RouteCase, scores_TE: torch.Tensor, ids_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TK = scores_TE.gather(1, ids_TK)
    if case.normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * case.scale


def experts(
    case: ExpertsCase,
    weights: tuple[Tensors, Tensors, Tensors],
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    dtype = TORCH_DTYPES[case.dtype]
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in range(case.experts):
        w1, w2, w3 = (
            to_float(case.weight_format, tuple(t[expert] for t in tensors), case.block)
            for tensors in weights
        )
        # What each row gives this expert: 0 for the rows that did not choose it.
        share_T = (weights_TK * (ids_TK == expert)).sum(-1)
        x = x_TD.float()
        hidden_TF = _gated(x @ w1.T, x @ w3.T, case.limit).to(dtype).float()
        y_TD += share_T.unsqueeze(1) * (hidden_TF @ w2.T)
    return y_TD


def swiglu(case: SwigluCase, gate_up_TF: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    return _gated(gate_TF, up_TF, case.limit).to(TORCH_DTYPES[case.dtype])


def _gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


BACKENDS = (
    Backend("moe.route_hash", REFERENCE, route_hash),
    Backend("moe.route_learned", REFERENCE, route_learned),
    Backend("moe.experts", REFERENCE, experts),
    Backend("moe.swiglu", REFERENCE, swiglu),
)
