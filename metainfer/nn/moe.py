"""Mixture of experts: routing by hash or by score, routed experts, and the shared one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from metainfer.arch.record import LayerArch, RouterKind
from metainfer.nn.builder import LayerBuilder, weight_tensors
from metainfer.nn.linear import StackedLinear, linear
from metainfer.ops.moe import ExpertsCase, RouteCase, SwigluCase


class SharedExpert:
    """The expert that every row goes through; this rank's part of it."""

    def __init__(self, build: LayerBuilder, prefix: str) -> None:
        self._gate_up = StackedLinear(build, (f"{prefix}.w1", f"{prefix}.w3"))
        self._down = linear(build, f"{prefix}.w2")
        inner = build.checkpoint.weight(f"{prefix}.w1").shape[0]
        case = SwigluCase(inner, build.arch.swiglu_limit, build.dtype)
        self._swiglu = build.kernel("moe.swiglu", case)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._down(self._swiglu(self._gate_up.joined(x_TD)))


class MixtureOfExperts:
    """x_TD -> fp32 y_TD, summed over ranks."""

    def __init__(self, build: LayerBuilder, layer: LayerArch) -> None:
        arch = build.arch
        prefix = f"layers.{layer.index}.ffn"
        self._group = build.group
        self._hashes = layer.router is RouterKind.HASH
        route_case = RouteCase(
            arch.num_experts,
            arch.experts_per_token,
            arch.hidden_size,
            arch.routed_scaling_factor,
            arch.norm_topk_prob,
            build.dtype,
        )
        gate = build.checkpoint.tensor(f"{prefix}.gate.weight")
        if self._hashes:
            table = build.checkpoint.expert_table(f"{prefix}.gate.tid2eid")
            self._route = build.weighted("moe.route_hash", route_case, gate, table)
        else:
            bias = build.checkpoint.tensor(f"{prefix}.gate.bias")
            self._route = build.weighted("moe.route_learned", route_case, gate, bias)
        self._shared = SharedExpert(build, f"{prefix}.shared_experts")
        self._experts = self._bind_experts(build, f"{prefix}.experts")

    @staticmethod
    def _bind_experts(build: LayerBuilder, prefix: str) -> Callable[..., torch.Tensor]:
        arch = build.arch
        w1, w2, w3 = build.checkpoint.experts(prefix, range(arch.num_experts), build.device)
        weight_format, _, block = weight_tensors(w1)
        case = ExpertsCase(
            arch.num_experts,
            arch.experts_per_token,
            arch.hidden_size,
            w1.shape[1],
            arch.swiglu_limit,
            weight_format,
            block,
            build.dtype,
        )
        tensors = [weight_tensors(weight)[1] for weight in (w1, w2, w3)]
        return build.weighted("moe.experts", case, *tensors)

    def __call__(self, x_TD: torch.Tensor, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self._hashes:
            ids_TK, weights_TK = self._route(x_TD, token_ids_T)
        else:
            ids_TK, weights_TK = self._route(x_TD)
        y_TD = self._experts(x_TD, ids_TK, weights_TK)
        return self._group.all_reduce(y_TD.add_(self._shared(x_TD)))
