"""Routing and experts, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dequantise import scales_to_float, to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.formats import decode_e4m3
from metainfer.kernels.reference.quantise import fp8_groups
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.moe import (
    ExpertsCase,
    ExpertsFp8RowsCase,
    RouteCase,
    SwigluCase,
    SwigluFp8Case,
)

Tensors = tuple[torch.Tensor, ...]


def route_hash(
    case: RouteCase,
    weights: Tensors,
    x_TD: torch.Tensor,
    token_ids_T: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_ED, table_VK = weights
    ids_TK, weights_TK = _weigh(case, _scores(case, gate_ED, x_TD), table_VK[token_ids_T])
    return without_padding(ids_TK, padding_T1), weights_TK


def route_learned(
    case: RouteCase,
    weights: Tensors,
    x_TD: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_ED, bias_E = weights
    scores_TE = _scores(case, gate_ED, x_TD)
    biased_TE = _within_groups(case, scores_TE + bias_E)
    chosen_TK = biased_TE.topk(case.selected, dim=-1).indices
    ids_TK, weights_TK = _weigh(case, scores_TE, chosen_TK)
    return without_padding(ids_TK, padding_T1), weights_TK


def without_padding(ids_TK: torch.Tensor, padding_T1: torch.Tensor | None) -> torch.Tensor:
    """-1 for rows of padding."""
    return ids_TK if padding_T1 is None else ids_TK.masked_fill(padding_T1, -1)


def _scores(case: RouteCase, gate_ED: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    logits_TE = x_TD.float() @ gate_ED.float().T
    if case.score == "sigmoid":
        return logits_TE.sigmoid()
    return torch.nn.functional.softplus(logits_TE).sqrt()


def _within_groups(case: RouteCase, biased_TE: torch.Tensor) -> torch.Tensor:
    """-inf for the experts of groups that are not kept."""
    if case.groups == 1:
        return biased_TE
    biased_TGE = biased_TE.unflatten(1, (case.groups, -1))
    best_TG = biased_TGE.topk(2, dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    kept_TG.scatter_(1, best_TG.topk(case.group_topk, dim=-1).indices, True)
    return biased_TGE.masked_fill(~kept_TG.unsqueeze(2), -torch.inf).flatten(1)


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


def experts_fp8_rows(
    case: ExpertsFp8RowsCase,
    weights: tuple[Tensors, Tensors, Tensors],
    codes_TD: torch.Tensor,
    scales_TG: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    x_TD = _decoded(codes_TD, scales_TG)
    y_TD = torch.zeros_like(x_TD)
    for expert in range(case.experts):
        chose_TK = ids_TK == expert
        rows = chose_TK.any(-1).nonzero().flatten()
        w1, w2, w3 = (
            to_float(case.weight_format, tuple(t[expert] for t in tensors), case.block)
            for tensors in weights
        )
        x = x_TD[rows]
        hidden = _gated(x @ w1.T, x @ w3.T, case.limit).to(TORCH_DTYPES[case.dtype])
        coded = _decoded(*fp8_groups(hidden, case.group, case.scale))
        share = (weights_TK * chose_TK).sum(-1, keepdim=True)[rows]
        y_TD[rows] += share * (coded @ w2.T)
    return y_TD


def _decoded(codes_TD: torch.Tensor, scales_TG: torch.Tensor) -> torch.Tensor:
    """Codes and scales of groups -> fp32 [T, D]."""
    numbers = decode_e4m3(codes_TD).unflatten(1, (scales_TG.shape[1], -1))
    return (numbers * scales_to_float(scales_TG).unsqueeze(2)).flatten(1)


def swiglu(case: SwigluCase, gate_up_TF: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    return _gated(gate_TF, up_TF, case.limit).to(TORCH_DTYPES[case.dtype])


def swiglu_fp8(case: SwigluFp8Case, gate_up_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    y_TF = _gated(gate_TF, up_TF, case.limit).to(TORCH_DTYPES[case.dtype])
    return fp8_groups(y_TF, case.group, case.scale)


def _gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


BACKENDS = (
    Backend("moe.route_hash", REFERENCE, route_hash),
    Backend("moe.route_learned", REFERENCE, route_learned),
    Backend("moe.experts", REFERENCE, experts),
    Backend("moe.experts_fp8_rows", REFERENCE, experts_fp8_rows),
    Backend("moe.swiglu", REFERENCE, swiglu),
    Backend("moe.swiglu_fp8", REFERENCE, swiglu_fp8),
)
