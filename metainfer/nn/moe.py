"""Mixture of experts: routing by hash or by score, routed experts, and the shared one."""

from __future__ import annotations

import torch

from metainfer.arch.record import LayerArch, RouterKind
from metainfer.arch.split import COLUMNS, ROWS
from metainfer.nn.builder import LayerBuilder, weight_tensors
from metainfer.nn.linear import Linear, StackedLinear
from metainfer.nn.rows import Rows, rounds
from metainfer.nn.step_index import StepIndex
from metainfer.nn.sums import sum_rows
from metainfer.ops.moe import (
    ExpertsCase,
    ExpertsFp8RowsCase,
    RouteCase,
    SwigluCase,
    SwigluFp8Case,
)
from metainfer.weights.formats import Weight, part_of


class SharedExpert:
    """The expert that every row goes through; this rank's part of it."""

    def __init__(self, build: LayerBuilder, w1: Weight, w2: Weight, w3: Weight) -> None:
        self._gate_up = StackedLinear(build, (w1, w3))
        self._down = Linear(build, w2)
        inner, limit = w1.shape[0], build.arch.swiglu_limit
        if self._down.coded:
            assert build.rounding is not None
            coded_case = SwigluFp8Case(inner, limit, *build.rounding, build.dtype)
            self._swiglu = build.kernel("moe.swiglu_fp8", coded_case)
        else:
            self._swiglu = build.kernel("moe.swiglu", SwigluCase(inner, limit, build.dtype))

    def __call__(self, x: Rows) -> torch.Tensor:
        inner = self._swiglu(self._gate_up.joined(x))
        return self._down(Rows(None, *inner) if self._down.coded else Rows(inner))


class MixtureOfExperts:
    """Rows of width D -> fp32 y_TD of the routed experts and y_TD of the shared one, which whoever
    reads them adds. Several ranks add both before they sum over ranks: that is one exchange, of
    rows in the compute dtype. A rank adds what its experts give, or its slices of them: to it, ids
    of experts that are elsewhere are those of none.

    The shared expert runs beside the routed ones on the side stream, where there is one for so many
    rows.

    Attributes:
        weights: that every row reads: the router's, then the shared expert's.
    """

    def __init__(self, build: LayerBuilder, layer: LayerArch) -> None:
        arch = build.arch
        prefix = f"layers.{layer.index}.ffn"
        self._placement, self._dtype = build.placement, build.compute_dtype
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
        self._side_stream = build.side_stream
        self._by_heads, self._by_tokens = _shared_experts(build, f"{prefix}.shared_experts")
        self._bind_experts(build, f"{prefix}.experts")

    def _bind_experts(self, build: LayerBuilder, prefix: str) -> None:
        arch = build.arch
        own = build.placement.own_experts(arch.num_experts)
        self._first_expert = own.start  # what is outside of `own` is no expert here
        w1, w2, w3 = build.checkpoint.experts(prefix, own, build.device)
        weight_format, _, block = weight_tensors(w1)
        inner = w1.shape[1]
        shape = len(own), arch.experts_per_token, arch.hidden_size, inner
        stored = arch.swiglu_limit, weight_format, block
        self._coded = (
            weight_format != "dense" and rounds(build, arch.hidden_size) and rounds(build, inner)
        )
        tensors = [weight_tensors(weight)[1] for weight in (w1, w2, w3)]
        if self._coded:
            assert build.rounding is not None
            coded_case = ExpertsFp8RowsCase(*shape, *stored, *build.rounding, build.dtype)
            self._experts = build.weighted("moe.experts_fp8_rows", coded_case, *tensors)
        else:
            case = ExpertsCase(*shape, *stored, build.dtype)
            self._experts = build.weighted("moe.experts", case, *tensors)

    def __call__(
        self, x: Rows, token_ids_T: torch.Tensor, step: StepIndex
    ) -> tuple[torch.Tensor, ...]:
        shared = self._by_heads if step.shares is None else self._by_tokens
        assert shared is not None
        side = self._side_stream
        if side is None or not side.takes(len(token_ids_T)):
            y_TD = self._routed(x, self._chosen(x, token_ids_T, step), step)
            return self._summed(y_TD, shared(x), step)
        main = torch.cuda.current_stream()
        side.stream.wait_stream(main)
        # First, so that the shared expert's products, which fill the GPU, do not keep the choice
        # waiting, and the routed experts with it.
        chosen = self._chosen(x, token_ids_T, step)
        with torch.cuda.stream(side.stream):
            shared_TD = shared(x)
        y_TD = self._routed(x, chosen, step)
        # All that either stream reads is held until here, so memory is not used again too early.
        main.wait_stream(side.stream)
        return self._summed(y_TD, shared_TD, step)

    def _summed(
        self, y_TD: torch.Tensor, shared_TD: torch.Tensor, step: StepIndex
    ) -> tuple[torch.Tensor, ...]:
        side = self._placement.by_heads
        if step.shares is not None:
            assert self._placement.by_tokens is not None
            side = self._placement.by_tokens
        elif side.heads.size == 1:
            return y_TD, shared_TD
        return (sum_rows(side.heads, (y_TD + shared_TD).to(shared_TD.dtype), step),)

    def _chosen(
        self, x: Rows, token_ids_T: torch.Tensor, step: StepIndex
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids_TK and weights_TK of experts."""
        hashed = (token_ids_T,) if self._hashes else ()
        ids_TK, weights_TK = self._route(x.plain, *hashed, step.padding_T1)
        return ids_TK, weights_TK

    def _routed(
        self, x: Rows, chosen: tuple[torch.Tensor, torch.Tensor], step: StepIndex
    ) -> torch.Tensor:
        """y_TD of the routed experts: fp32, of this rank's part of them; or of all of them in the
        compute dtype, where rows are shared."""
        ids_TK, weights_TK = chosen
        inputs = x.coded if self._coded else (x.plain,)
        if step.shares is None:
            own_TK = ids_TK - self._first_expert if self._first_expert else ids_TK
            y_TD: torch.Tensor = self._experts(*inputs, own_TK, weights_TK)
            return y_TD
        # Rows that a rank lacks come as zeros, which must be no expert.
        *rows, after_TK, weights_TK = step.shares.gather_rows(*inputs, ids_TK + 1, weights_TK)
        partial_TD = self._experts(*rows, after_TK - (1 + self._first_expert), weights_TK)
        return step.shares.scatter_sums(partial_TD.to(self._dtype), len(ids_TK))


def _shared_experts(build: LayerBuilder, prefix: str) -> tuple[SharedExpert, SharedExpert | None]:
    """By heads, and by tokens, where there are such steps: then the first has some of the inner
    channels of the second."""
    w1, w2, w3 = (
        build.checkpoint.weight(f"{prefix}.{name}").to(build.device) for name in ("w1", "w2", "w3")
    )
    by_tokens = build.placement.by_tokens
    if by_tokens is None:
        return SharedExpert(build, w1, w2, w3), None
    part = by_tokens.rows.rank, by_tokens.rows.size
    whole = SharedExpert(build, w1, w2, w3)
    with build.again():
        w1, w3 = part_of(w1, ROWS, *part), part_of(w3, ROWS, *part)
        return SharedExpert(build, w1, part_of(w2, COLUMNS, *part), w3), whole
