"""Operations as an eager framework composes them of torch's own: the generic path.

Caches are bf16 and weights are unpacked to bf16 beforehand; gathers and scores are bounded by
working on some rows at a time. Operations that are elementwise, or that are a plain formula over
fp32, run the reference: that is such code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from metainfer.bench.ops_arguments import (
    decode_lists,
    dense_index,
    named_arguments,
    prefill_lists,
)
from metainfer.kernels.inputs.base import DTYPES, Call
from metainfer.kernels.reference import BACKENDS
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.timing import Timed
from metainfer.ops.catalogue import OPS

Side = Callable[[Any, Call], Timed]
_CHUNK_BYTES = 2**29


def generic_side(op: str) -> Side:
    """What prepares the generic path of an operation."""
    return _COMPOSED.get(op, partial(_reference, op))


def _reference(op: str, case: Any, call: Call) -> Timed:
    (run,) = (backend.run for backend in BACKENDS if backend.op == op)
    if OPS[op].weights:
        return partial(run, case, call.weights, *call.arguments)
    return partial(run, case, *call.arguments)


def _sparse_prefill(case: Any, call: Call) -> Timed:
    given = named_arguments("attention.sparse_prefill", call)
    keys_NK, rows_TN = prefill_lists(case, given)
    return partial(_attention, case, given["q_THK"], keys_NK, rows_TN, given["sink_H"])


def _sparse_decode(case: Any, call: Call) -> Timed:
    given = named_arguments("attention.sparse_decode", call)
    keys_NK, rows_TN = decode_lists(case, given)
    return partial(_attention, case, given["q_THK"], keys_NK, rows_TN, given["sink_H"])


def _attention(
    case: Any,
    q_THK: torch.Tensor,
    keys_NK: torch.Tensor,
    rows_TN: torch.Tensor,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """So many rows at once that gathered keys and fp32 scores stay within the chunk."""
    row_bytes = rows_TN.shape[1] * (2 * case.key_width + 10 * case.heads)
    step = max(1, _CHUNK_BYTES // row_bytes)
    keys_NK = keys_NK.to(q_THK.dtype)
    return torch.cat(
        [
            _attend(case, q_THK[n : n + step], keys_NK, rows_TN[n : n + step], sink_H)
            for n in range(0, len(q_THK), step)
        ]
    )


def _attend(
    case: Any,
    q_THK: torch.Tensor,
    keys_NK: torch.Tensor,
    rows_TN: torch.Tensor,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    """Gather, product, mask, softmax with the sink as one more column, product."""
    keys_TNK = keys_NK[rows_TN.clamp(min=0)]
    scores_THN = (q_THK @ keys_TNK.transpose(1, 2)).float() * case.score_scale
    scores_THN = scores_THN.masked_fill((rows_TN < 0).unsqueeze(1), -torch.inf)
    if sink_H is not None:
        sink_TH1 = sink_H.expand(len(q_THK), -1).unsqueeze(-1)
        scores_THN = torch.cat([scores_THN, sink_TH1], dim=-1)
    weights_THN = scores_THN.softmax(-1)[..., : rows_TN.shape[1]].to(q_THK.dtype)
    return weights_THN @ keys_TNK[..., : case.width]


def _index_topk(case: Any, call: Call) -> Timed:
    given = named_arguments("attention.index_topk", call)
    q_THI, keys_MI = (dense_index(case, given[name]) for name in ("q", "keys"))
    weights_TH, positions_T = given["weights_TH"], given["positions_T"]
    keys_EI = keys_MI[given["key_rows_BE"][0]]

    def part(rows: slice) -> torch.Tensor:
        products_THE = torch.einsum("thi,ei->the", q_THI[rows], keys_EI).relu()
        scores_TE = torch.einsum("th,the->te", weights_TH[rows].to(q_THI.dtype), products_THE)
        entry_E = torch.arange(len(keys_EI), device=keys_EI.device)
        unseen_TE = entry_E >= (positions_T[rows, None] + 1) // case.ratio
        scores_TE = scores_TE.float().masked_fill(unseen_TE, -torch.inf)
        return scores_TE.topk(min(case.topk, len(keys_EI)), dim=-1).indices

    def run() -> torch.Tensor:
        step = max(1, _CHUNK_BYTES // (2 * case.heads * len(keys_EI)))
        return torch.cat([part(slice(n, n + step)) for n in range(0, len(q_THI), step)])

    return run


def _index_topk_decode(case: Any, call: Call) -> Timed:
    given = named_arguments("attention.index_topk_decode", call)
    q_THI, keys_MI = (dense_index(case, given[name]) for name in ("q", "keys"))
    weights_TH, rows_TE = given["weights_TH"], given["key_rows_TE"]

    def run() -> torch.Tensor:
        keys_TEI = keys_MI[rows_TE.clamp(min=0)]
        products_THE = (q_THI @ keys_TEI.transpose(1, 2)).relu()
        scores_TE = (weights_TH.to(q_THI.dtype).unsqueeze(1) @ products_THE).squeeze(1).float()
        scores_TE = scores_TE.masked_fill(rows_TE < 0, -torch.inf)
        return scores_TE.topk(min(case.topk, rows_TE.shape[1]), dim=-1).indices

    return run


def _dense(case: Any, call: Call) -> Timed:
    (weight_OI,), (x_TI,) = call.weights, call.arguments
    weight_OI = weight_OI.to(x_TI.dtype)
    return lambda: torch.nn.functional.linear(x_TI, weight_OI).to(DTYPES[case.out_dtype])


def _fp8_block(case: Any, call: Call) -> Timed:
    (x_TI,) = call.arguments
    weight_OI = to_float("fp8_block", call.weights, case.block).to(x_TI.dtype)
    return lambda: torch.nn.functional.linear(x_TI, weight_OI)


def _grouped(case: Any, call: Call) -> Timed:
    (x_TGI,) = call.arguments
    weight_OI = to_float(case.weight_format, call.weights, case.block).to(x_TGI.dtype)
    weight_GLI = weight_OI.unflatten(0, (case.groups, case.rows))
    return lambda: torch.einsum("tgi,gli->tgl", x_TGI, weight_GLI).flatten(1)


def _experts(case: Any, call: Call) -> Timed:
    x_TD, ids_TK, weights_TK = call.arguments
    w1, w2, w3 = (_expanded(case, weight) for weight in call.weights)

    def run() -> torch.Tensor:
        y_TD = torch.zeros(x_TD.shape, device=x_TD.device)
        for expert in ids_TK.unique().tolist():
            rows, places = (ids_TK == expert).nonzero(as_tuple=True)
            x = x_TD[rows]
            gate = (x @ w1[expert].T).clamp(max=case.limit)
            up = (x @ w3[expert].T).clamp(-case.limit, case.limit)
            hidden = torch.nn.functional.silu(gate) * up
            y_TD.index_add_(0, rows, (hidden @ w2[expert].T) * weights_TK[rows, places, None])
        return y_TD

    return run


def _expanded(case: Any, weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[E, rows, columns] in the case's dtype, one expert after the other."""
    return torch.stack(
        [
            to_float(case.weight_format, tuple(t[expert] for t in weight), case.block).to(
                DTYPES[case.dtype]
            )
            for expert in range(case.experts)
        ]
    )


_COMPOSED: Mapping[str, Side] = MappingProxyType(
    {
        "attention.sparse_prefill": _sparse_prefill,
        "attention.sparse_decode": _sparse_decode,
        "attention.index_topk": _index_topk,
        "attention.index_topk_decode": _index_topk_decode,
        "linear.dense": _dense,
        "linear.fp8_block": _fp8_block,
        "linear.grouped": _grouped,
        "moe.experts": _experts,
    }
)
