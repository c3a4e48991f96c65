"""Routed experts over unpacked weights: torch's grouped products on a GPU, one expert after the
other on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import COMPOSED
from metainfer.ops.moe import ExpertsCase

Tensors = tuple[torch.Tensor, ...]
_ALIGNED_BYTES = 16  # what torch's grouped products ask of rows


@dataclass(frozen=True, slots=True)
class Experts:
    """Gate and up one below the other [E, 2 F, D], and down [E, D, F], in the case's dtype."""

    gate_up: torch.Tensor
    down: torch.Tensor


def prepare(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Experts:
    dtype, device = TORCH_DTYPES[case.dtype], w1[0].device
    gate_up = torch.empty(case.experts, 2 * case.inner, case.width, dtype=dtype, device=device)
    down = torch.empty(case.experts, case.width, case.inner, dtype=dtype, device=device)
    for expert in range(case.experts):  # one at a time: in fp32 all would take twice the room
        gate, of_down, up = (
            to_float(case.weight_format, tuple(t[expert] for t in w), case.block)
            for w in (w1, w2, w3)
        )
        gate_up[expert, : case.inner], gate_up[expert, case.inner :] = gate, up
        down[expert] = of_down
    return Experts(gate_up, down)


def experts(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    size = x_TD.element_size()
    aligned = not (case.width * size % _ALIGNED_BYTES or case.inner * size % _ALIGNED_BYTES)
    if x_TD.device.type == "cuda" and x_TD.dtype is torch.bfloat16 and aligned and len(x_TD):
        return _grouped(case, weights, x_TD, ids_TK, weights_TK)
    y_TD = torch.zeros(x_TD.shape, device=x_TD.device)
    own_TK = (ids_TK >= 0) & (ids_TK < case.experts)
    for expert in ids_TK[own_TK].unique().tolist():
        rows, places = (ids_TK == expert).nonzero(as_tuple=True)
        hidden = _hidden(case, linear(x_TD[rows], weights.gate_up[expert]))
        out = linear(hidden, weights.down[expert])
        y_TD.index_add_(0, rows, out.float() * weights_TK[rows, places, None])
    return y_TD


def _grouped(
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """Rows sorted by expert; those without one come last, and what they give is not counted."""
    ids = torch.where(ids_TK < 0, case.experts, ids_TK).flatten().clamp(max=case.experts)
    order = ids.argsort()
    counts_E = torch.bincount(ids, minlength=case.experts + 1)[: case.experts]
    ends_E = counts_E.cumsum(0).to(torch.int32)
    rows = order // ids_TK.shape[1]
    product = torch.nn.functional.grouped_mm
    hidden = _hidden(case, product(x_TD[rows], weights.gate_up.transpose(1, 2), offs=ends_E))
    y = product(hidden, weights.down.transpose(1, 2), offs=ends_E).float()
    y = torch.where(
        (ids[order] < case.experts).unsqueeze(1), y * weights_TK.flatten()[order].unsqueeze(1), 0.0
    )
    # Not index_add_: on a GPU its sums differ from run to run.
    y_PD = torch.empty_like(y)
    y_PD[order] = y
    return y_PD.view(*ids_TK.shape, -1).sum(1)


def _hidden(case: ExpertsCase, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.clamp(max=case.limit)) * up.clamp(-case.limit, case.limit)


BACKENDS = (Backend("moe.experts", COMPOSED, experts, prepare=prepare, expands=True),)
