"""Routing, and the routed experts: only chosen ones are unpacked, each once for all its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu, softplus

from metainfer.kernels.cpu.backend import cpu_backend, expanded_backend, on_cpu
from metainfer.kernels.cpu.product import product
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.cpu.unpack import Fp4Weights, Fp8Weight, fp4_weights, fp8_weight
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.moe import without_padding
from metainfer.kernels.registry import Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.moe import ExpertsCase, RouteCase, SwigluCase

Tensors = tuple[torch.Tensor, ...]

# Steps of so few rows take all rows through all chosen experts at once.
_FEW_ROWS = 16
# Weights of experts that are unpacked at a time in such a step.
_TILE_WEIGHTS = 2**21
# Weights of an expert in fp4 from which on it is kept in parts: 4 MB of fp32.
_PART_WEIGHTS = 2**20


class Router(NamedTuple):
    """fp32 gate [E, D], and what chooses: a bias [E] or a table [vocabulary, K]."""

    gate_ED: torch.Tensor
    choice: torch.Tensor


def prepare_router(case: RouteCase, gate_ED: torch.Tensor, choice: torch.Tensor) -> Router:
    return Router(gate_ED.float(), choice)


def route_hash(
    case: RouteCase,
    router: Router,
    x_TD: torch.Tensor,
    token_ids_T: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen_TK = router.choice.index_select(0, token_ids_T)
    ids_TK, weights_TK = _weigh(case, _scores(router, x_TD), chosen_TK)
    return without_padding(ids_TK, padding_T1), weights_TK


def route_learned(
    case: RouteCase,
    router: Router,
    x_TD: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_TE = _scores(router, x_TD)
    chosen = (scores_TE + router.choice).topk(case.selected, dim=-1, sorted=False)
    ids_TK, weights_TK = _weigh(case, scores_TE, chosen.indices)
    return without_padding(ids_TK, padding_T1), weights_TK


def _scores(router: Router, x_TD: torch.Tensor) -> torch.Tensor:
    return softplus(linear(x_TD.float(), router.gate_ED)).sqrt_()


def _weigh(
    case: RouteCase, scores_TE: torch.Tensor, ids_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TK = scores_TE.gather(1, ids_TK)
    if case.normalise:
        weights_TK.div_(weights_TK.sum(-1, keepdim=True).add_(1e-20))
    return ids_TK, weights_TK.mul_(case.scale)


def routes_eligible(case: RouteCase, target: Target) -> Verdict:
    """Whether experts are scored as V4 does, all in one group."""
    if case.score != "sqrtsoftplus" or case.groups > 1:
        return no(f"scores with sqrtsoftplus in one group, not {case.score} in {case.groups}")
    return on_cpu(case, target)


class DenseExperts(NamedTuple):
    """Numbers of the compute dtype: gate and up one below the other [E, 2 F, D], down [E, D, F]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def of(self, case: ExpertsCase, part: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of the experts that `part` names."""
        if isinstance(part, int):
            return self.gate_up[part], self.down[part]
        return self.gate_up.index_select(0, part), self.down.index_select(0, part)


class Fp8Experts(NamedTuple):
    """The same as codes."""

    gate_up: Fp8Weight
    down: Fp8Weight

    def of(self, case: ExpertsCase, part: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of the experts that `part` names, unpacked to fp32."""
        down = self.down.of(part).unpack()
        return self.gate_up.of(part).unpack(), down[..., : case.width, :]


class Fp4Experts(NamedTuple):
    """Gate, up and down of each expert as one row of codes, or of each part of an expert.

    Large experts are kept as parts of F that are added up like experts of their own, so that what
    is unpacked at a time stays small.

    Attributes:
        parts: of each expert, one after the other.
        part: the case with parts in place of experts.
        unpack: of some of the weights, fp32.
    """

    weights: Fp4Weights
    parts: int
    part: ExpertsCase
    unpack: Callable[[Fp4Weights], torch.Tensor] = Fp4Weights.unpack

    def of(self, case: ExpertsCase, part: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up, and down, of the parts that `part` names, unpacked to fp32."""
        numbers = self.unpack(self.weights.of(part))
        gate_up, down = numbers.split([2 * case.inner * case.width, case.inner * case.width], -1)
        shape = 2 * case.inner, case.width
        return gate_up.unflatten(-1, shape), down.unflatten(-1, (case.width, case.inner))


Experts = DenseExperts | Fp8Experts | Fp4Experts


def experts_eligible(case: ExpertsCase, target: Target) -> Verdict:
    if case.weight_format == "fp8_block" and case.inner % case.block[0]:
        return no(f"{case.inner} rows of an expert do not fill blocks of {case.block[0]}")
    return on_cpu(case, target)


def prepare_experts(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Experts:
    if case.weight_format == "fp4_group":
        return _prepare_fp4(case, w1, w2, w3)
    codes, *scales = (torch.cat([gate, up], dim=1) for gate, up in zip(w1, w3, strict=True))
    if case.weight_format == "fp8_block":
        gate_up = fp8_weight(codes, scales[0], case.block)
        return Fp8Experts(gate_up, fp8_weight(w2[0], w2[1], case.block))
    dtype = TORCH_DTYPES[case.dtype]
    return DenseExperts(codes.to(dtype), w2[0].to(dtype))


def _prepare_fp4(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Fp4Experts:
    groups = case.inner // case.block[1]
    sizes = [count for count in range(1, groups + 1) if groups % count == 0]
    group_weights = 3 * case.block[1] * case.width
    most = max(count for count in sizes if count == 1 or count * group_weights <= _PART_WEIGHTS)
    parts = groups // most

    def rows(of_experts: torch.Tensor) -> torch.Tensor:
        return of_experts.unflatten(1, (parts, -1)).flatten(0, 1)

    def columns(of_experts: torch.Tensor) -> torch.Tensor:
        return of_experts.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)

    packed, scales = (
        (rows(gate), rows(up), columns(down)) for gate, down, up in zip(w1, w2, w3, strict=True)
    )
    part = replace(
        case,
        experts=case.experts * parts,
        selected=case.selected * parts,
        inner=case.inner // parts,
    )
    return Fp4Experts(fp4_weights(packed, scales), parts, part)


def prepare_expanded(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> DenseExperts:
    dtype = TORCH_DTYPES[case.dtype]
    gate_up = torch.empty(case.experts, 2 * case.inner, case.width, dtype=dtype)
    down = torch.empty(case.experts, case.width, case.inner, dtype=dtype)
    for expert in range(case.experts):
        w1_e, w2_e, w3_e = (tuple(t[expert] for t in w) for w in (w1, w2, w3))
        gate_up[expert, : case.inner] = to_float(case.weight_format, w1_e, case.block)
        gate_up[expert, case.inner :] = to_float(case.weight_format, w3_e, case.block)
        down[expert] = to_float(case.weight_format, w2_e, case.block)
    return DenseExperts(gate_up, down)


def experts(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    if isinstance(weights, Fp4Experts) and weights.parts > 1:
        case, part = weights.part, torch.arange(weights.parts)
        ids_TK = (ids_TK.unsqueeze(2) * weights.parts + part).flatten(1)
        weights_TK = weights_TK.repeat_interleave(weights.parts, dim=1)
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
    chosen_U, share_TU = _shares(case.experts, ids_TK, weights_TK)
    parts = []
    for tile in row_tiles(len(chosen_U), 3 * case.inner * case.width, _TILE_WEIGHTS):
        gate_up_UFD, down_UDF = weights.of(case, chosen_U[tile])
        x_UTD = x_TD.to(gate_up_UFD.dtype).expand(len(down_UDF), -1, -1)
        gate_up_UTF = torch.bmm(x_UTD, gate_up_UFD.transpose(1, 2)).float()
        gate_UTF, up_UTF = gate_up_UTF.chunk(2, dim=-1)
        hidden_UTF = _gated(gate_UTF, up_UTF, case.limit).to(down_UDF.dtype)
        out_UTD = torch.bmm(hidden_UTF, down_UDF.transpose(1, 2)).float()
        parts.append(torch.bmm(share_TU[:, tile].unsqueeze(1), out_UTD.transpose(0, 1)))
    return sum(parts[1:], parts[0]).squeeze(1) if parts else torch.zeros(x_TD.shape)


def _shares(
    experts: int, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that any row chose [U], and what each row gives them, fp32 [T, U]."""
    if len(ids_TK) == 1:
        chosen_U, share_TU = ids_TK[0], weights_TK
    else:
        chosen_U, place_TK = ids_TK.unique(return_inverse=True)
        share_TU = torch.zeros(len(ids_TK), len(chosen_U)).scatter_add_(1, place_TK, weights_TK)
    own_U = (chosen_U >= 0) & (chosen_U < experts)
    return (chosen_U, share_TU) if bool(own_U.all()) else (chosen_U[own_U], share_TU[:, own_U])


def _experts_of_many(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """The rows of each expert side by side."""
    dtype = TORCH_DTYPES[case.dtype]
    ids = torch.where(ids_TK < 0, case.experts, ids_TK).flatten().clamp_(max=case.experts)
    order = ids.argsort(stable=True)  # what is no expert comes last
    row_of, share_of = order // ids_TK.shape[1], weights_TK.flatten()[order].unsqueeze(1)
    y_TD = torch.zeros(x_TD.shape)
    first = 0
    for expert, count in enumerate(ids.bincount(minlength=case.experts)[: case.experts].tolist()):
        if count == 0:
            continue
        rows, share = row_of[first : first + count], share_of[first : first + count]
        first += count
        gate_up_FD, down_DF = weights.of(case, expert)
        hidden = swiglu(case, product(x_TD.index_select(0, rows), gate_up_FD.to(dtype)))
        out = product(hidden, down_DF.to(dtype))
        y_TD.index_add_(0, rows, out.float().mul_(share))
    return y_TD


def swiglu(case: SwigluCase | ExpertsCase, gate_up_TF: torch.Tensor) -> torch.Tensor:
    y_TF = gate_up_TF[:, : case.inner]
    for tile in row_tiles(len(gate_up_TF), 2 * case.inner):
        gate_tF, up_tF = gate_up_TF[tile].float().chunk(2, dim=-1)
        y_TF[tile] = _gated(gate_tF, up_tF, case.limit)
    return y_TF


def _gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """In place of `gate`; overwrites both, which are fp32."""
    return silu(gate.clamp_(max=limit), inplace=True).mul_(up.clamp_(-limit, limit))


BACKENDS = (
    cpu_backend("moe.route_hash", route_hash, prepare_router, routes_eligible),
    cpu_backend("moe.route_learned", route_learned, prepare_router, routes_eligible),
    cpu_backend("moe.experts", experts, prepare_experts, experts_eligible),
    expanded_backend("moe.experts", experts, prepare_expanded),
    cpu_backend("moe.swiglu", swiglu),
)
