"""Routing and experts of few rows."""

from __future__ import annotations

from functools import partial

import torch

from metainfer.kernels.cpu import moe as torch_moe
from metainfer.kernels.cpu.backend import on_cpu
from metainfer.kernels.cpu.moe import Experts, Fp4Experts, Router
from metainfer.kernels.cpu.unpack import Fp4Weights
from metainfer.kernels.native.backend import (
    FEW_ROWS,
    MOST_ELEMENTS,
    Native,
    is_bf16,
    require,
    small,
)
from metainfer.kernels.native.library import Library
from metainfer.kernels.reference.moe import without_padding
from metainfer.kernels.registry import Backend, Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.moe import ExpertsCase, RouteCase, SwigluCase


def route_hash(
    library: Library,
    case: RouteCase,
    router: Router,
    x_TD: torch.Tensor,
    token_ids_T: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x_TD) > FEW_ROWS or x_TD.stride(1) != 1 or not token_ids_T.is_contiguous():
        return torch_moe.route_hash(case, router, x_TD, token_ids_T, padding_T1)
    choice = None, router.choice.data_ptr(), token_ids_T.data_ptr()
    ids_TK, weights_TK = _route(library, case, router, x_TD, *choice)
    return without_padding(ids_TK, padding_T1), weights_TK


def route_learned(
    library: Library,
    case: RouteCase,
    router: Router,
    x_TD: torch.Tensor,
    padding_T1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x_TD) > FEW_ROWS or x_TD.stride(1) != 1:
        return torch_moe.route_learned(case, router, x_TD, padding_T1)
    ids_TK, weights_TK = _route(library, case, router, x_TD, router.choice.data_ptr(), None, None)
    return without_padding(ids_TK, padding_T1), weights_TK


def _route(
    library: Library,
    case: RouteCase,
    router: Router,
    x_TD: torch.Tensor,
    bias: int | None,
    table: int | None,
    tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_TK = torch.empty(len(x_TD), case.selected, dtype=torch.int64)
    weights_TK = torch.empty(len(x_TD), case.selected)
    require(
        library.route(
            len(x_TD),
            case.experts,
            case.selected,
            case.width,
            router.gate_ED.data_ptr(),
            bias,
            table,
            tokens,
            x_TD.data_ptr(),
            x_TD.stride(0),
            is_bf16(x_TD),
            case.normalise,
            case.scale,
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
        )
    )
    return ids_TK, weights_TK


def prepare_router(case: RouteCase, gate_ED: torch.Tensor, choice: torch.Tensor) -> Router:
    return torch_moe.prepare_router(case, gate_ED.contiguous(), choice.contiguous())


def experts(
    library: Library,
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    if not isinstance(weights, Fp4Experts):
        return torch_moe.experts(case, weights, x_TD, ids_TK, weights_TK)
    if len(x_TD) > FEW_ROWS:
        weights = weights._replace(unpack=partial(unpack_fp4, library))
        return torch_moe.experts(case, weights, x_TD, ids_TK, weights_TK)
    x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    y_TD = torch.empty(x_TD.shape)
    packed, scale = weights.weights
    require(
        library.experts_fp4(
            len(x_TD),
            case.experts,
            weights.parts,
            case.selected,
            case.width,
            weights.part.inner,
            2 * packed.shape[1] // scale.shape[1],
            case.limit,
            packed.data_ptr(),
            scale.data_ptr(),
            x_TD.data_ptr(),
            is_bf16(x_TD),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            y_TD.data_ptr(),
        )
    )
    return y_TD


def unpack_fp4(library: Library, weights: Fp4Weights) -> torch.Tensor:
    """As `Fp4Weights.unpack`, with each code touched once: fp32 [..., N]."""
    packed, scale = weights
    numbers = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1])
    require(
        library.unpack_fp4(
            scale.numel() // scale.shape[-1],
            numbers.shape[-1],
            numbers.shape[-1] // scale.shape[-1],
            packed.data_ptr(),
            scale.data_ptr(),
            numbers.data_ptr(),
        )
    )
    return numbers


def experts_eligible(case: ExpertsCase, target: Target) -> Verdict:
    if case.weight_format != "fp4_group":
        return no(f"multiplies with fp4 weights alone, not with {case.weight_format} ones")
    if case.selected * case.inner * case.width > MOST_ELEMENTS:
        return no("so many elements are work for more than one thread")
    return on_cpu(case, target)


def swiglu(library: Library, case: SwigluCase, gate_up_TF: torch.Tensor) -> torch.Tensor:
    if len(gate_up_TF) > FEW_ROWS:
        return torch_moe.swiglu(case, gate_up_TF)
    require(
        library.swiglu(
            len(gate_up_TF), case.inner, case.limit, gate_up_TF.data_ptr(), is_bf16(gate_up_TF)
        )
    )
    return gate_up_TF[:, : case.inner]


_small_routes = small(lambda case: case.experts * case.width)


def routes_eligible(case: RouteCase, target: Target) -> Verdict:
    return torch_moe.routes_eligible(case, target) and _small_routes(case, target)


def backends(native: Native) -> tuple[Backend, ...]:
    return (
        native.backend("moe.route_hash", route_hash, prepare_router, routes_eligible),
        native.backend("moe.route_learned", route_learned, prepare_router, routes_eligible),
        native.backend("moe.experts", experts, torch_moe.prepare_experts, experts_eligible),
        native.backend("moe.swiglu", swiglu),
    )
