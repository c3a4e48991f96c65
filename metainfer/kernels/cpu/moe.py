"""Routing, and the routed experts: only chosen ones are unpacked, each once for all its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.functional import linear

from metainfer.kernels.cpu.backend import cpu_backend, expanded_backend, on_cpu
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.cpu.unpack import DenseWeight, Fp4Weight, Fp8Weight, fp4_weight, fp8_weight
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.moe import ExpertsCase, RouteCase, SwigluCase

Tensors = tuple[torch.Tensor, ...]
Weight = DenseWeight | Fp8Weight | Fp4Weight

# Steps of so few rows take all rows through all chosen experts at once.
_FEW_ROWS = 16
# Weights of experts that are unpacked at a time in such a step.
_TILE_WEIGHTS = 2**22


class Router(NamedTuple):
    """fp32 gate [E, D], and what chooses: a bias [E] or a table [vocabulary, K]."""

    gate_ED: torch.Tensor
    choice: torch.Tensor


def prepare_router(case: RouteCase, gate_ED: torch.Tensor, choice: torch.Tensor) -> Router:
    return Router(gate_ED.float(), choice)


def route_hash(
    case: RouteCase, router: Router, x_TD: torch.Tensor, token_ids_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _weigh(case, _scores(router, x_TD), router.choice.index_select(0, token_ids_T))


def route_learned(
    case: RouteCase, router: Router, x_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_TE = _scores(router, x_TD)
    chosen = (scores_TE + router.choice).topk(case.selected, dim=-1, sorted=False)
    return _weigh(case, scores_TE, chosen.indices)


def _scores(router: Router, x_TD: torch.Tensor) -> torch.Tensor:
    return functional.softplus(linear(x_TD.float(), router.gate_ED)).sqrt_()


def _weigh(
    case: RouteCase, scores_TE: torch.Tensor, ids_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TK = scores_TE.gather(1, ids_TK)
    if case.normalise:
        weights_TK.div_(weights_TK.sum(-1, keepdim=True).add_(1e-20))
    return ids_TK, weights_TK.mul_(case.scale)


class Experts(NamedTuple):
    """Gate and up one below the other [E, 2 F, D], and down [E, D, F]."""

    gate_up: Weight
    down: Weight


def experts_eligible(case: ExpertsCase, target: Target) -> Verdict:
    if case.weight_format == "fp8_block" and case.inner % case.block[0]:
        return no(f"{case.inner} rows of an expert do not fill blocks of {case.block[0]}")
    if case.weight_format == "fp4_group" and case.width % 2:
        return no(f"{case.width} rows of an expert in fp4 are an odd number")
    return on_cpu(case, target)


def prepare_experts(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Experts:
    gate_up = tuple(torch.cat([gate, up], dim=1) for gate, up in zip(w1, w3, strict=True))
    return Experts(_weight(case, gate_up), _weight(case, w2))


def _weight(case: ExpertsCase, tensors: Tensors) -> Weight:
    if case.weight_format == "fp8_block":
        return fp8_weight(tensors[0], tensors[1], case.block)
    if case.weight_format == "fp4_group":
        return fp4_weight(tensors[0], tensors[1])
    return DenseWeight(tensors[0].to(TORCH_DTYPES[case.dtype]))


def prepare_expanded(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Experts:
    dtype = TORCH_DTYPES[case.dtype]
    gate_up = torch.empty(case.experts, 2 * case.inner, case.width, dtype=dtype)
    down = torch.empty(case.experts, case.width, case.inner, dtype=dtype)
    for expert in range(case.experts):
        w1_e, w2_e, w3_e = (tuple(t[expert] for t in w) for w in (w1, w2, w3))
        gate_up[expert, : case.inner] = to_float(case.weight_format, w1_e, case.block)
        gate_up[expert, case.inner :] = to_float(case.weight_format, w3_e, case.block)
        down[expert] = to_float(case.weight_format, w2_e, case.block)
    return Experts(DenseWeight(gate_up), DenseWeight(down))


def experts(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    if len(x_TD) <= _FEW_ROWS:
        return _experts_of_few(case, weights, x_TD, ids_TK, weights_TK)
    return _experts_of_many(case, weights, x_TD, ids_TK, weights_TK)


def _experts_of_few(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """All rows through all chosen experts, which count nothing where a row did not choose them."""
    chosen_U, share_UT = _shares(ids_TK, weights_TK)
    y_TD = torch.zeros(x_TD.shape)
    for tile in row_tiles(len(chosen_U), 3 * case.inner * case.width, _TILE_WEIGHTS):
        gate_up_UFD = weights.gate_up.of(chosen_U[tile]).unpack()
        x = x_TD.to(gate_up_UFD.dtype)
        hidden_TUF = linear(x, gate_up_UFD.flatten(0, 1)).unflatten(1, gate_up_UFD.shape[:2])
        hidden_UTF = swiglu(case, hidden_TUF).transpose(0, 1)
        down_UDF = weights.down.of(chosen_U[tile]).unpack()[:, : case.width]
        out_UTD = torch.bmm(hidden_UTF, down_UDF.transpose(1, 2)).float()
        y_TD += torch.bmm(share_UT[tile].T.unsqueeze(1), out_UTD.transpose(0, 1)).squeeze(1)
    return y_TD


def _shares(ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that any row chose [U], and what each row gives them, fp32 [U, T]."""
    if len(ids_TK) == 1:
        return ids_TK[0], weights_TK.T
    chosen_U, place_TK = ids_TK.unique(return_inverse=True)
    share_TU = torch.zeros(len(ids_TK), len(chosen_U)).scatter_add_(1, place_TK, weights_TK)
    return chosen_U, share_TU.T


def _experts_of_many(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """The rows of each expert side by side."""
    dtype = TORCH_DTYPES[case.dtype]
    order = ids_TK.flatten().argsort(stable=True)
    row_of, share_of = order // ids_TK.shape[1], weights_TK.flatten()[order].unsqueeze(1)
    y_TD = torch.zeros(x_TD.shape)
    first = 0
    for expert, count in enumerate(ids_TK.flatten().bincount(minlength=case.experts).tolist()):
        if count == 0:
            continue
        rows, share = row_of[first : first + count], share_of[first : first + count]
        first += count
        x = x_TD.index_select(0, rows)
        hidden = swiglu(case, linear(x, weights.gate_up.of(expert).unpack().to(dtype)))
        out = linear(hidden, weights.down.of(expert).unpack().to(dtype)[: case.width])
        y_TD.index_add_(0, rows, out.float().mul_(share))
    return y_TD


def swiglu(case: SwigluCase | ExpertsCase, gate_up_TF: torch.Tensor) -> torch.Tensor:
    y_TF = gate_up_TF[..., : case.inner]
    gate_up_RF = gate_up_TF.flatten(0, -2)
    for tile in row_tiles(len(gate_up_RF), 2 * case.inner):
        gate, up = gate_up_RF[tile].float().chunk(2, dim=-1)
        functional.silu(gate.clamp_(max=case.limit), inplace=True)
        gate_up_RF[tile, : case.inner] = gate.mul_(up.clamp_(-case.limit, case.limit))
    return y_TF


BACKENDS = (
    cpu_backend("moe.route_hash", route_hash, prepare_router),
    cpu_backend("moe.route_learned", route_learned, prepare_router),
    cpu_backend("moe.experts", experts, prepare_experts, experts_eligible),
    expanded_backend("moe.experts", experts, prepare_expanded),
    cpu_backend("moe.swiglu", swiglu),
)
