"""The best open kernels that are installed, as sides of `bench ops`.

Each says for a work whether it does the same, and prepares its own form of the inputs: that is not
timed. What is not installed, or has no kernel for these shapes, is named with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from metainfer.bench.ops import OpWork, Side
from metainfer.bench.ops_arguments import decoded_rows, named_arguments, prefill_lists
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.timing import Timed

_FLASHMLA_LIST = 128  # its lists have a multiple of so many keys


@dataclass(frozen=True, slots=True)
class Peers:
    """Attributes:
    sides: name -> side for a work, None where it does something else.
    missing: name -> why it is not there.
    """

    sides: Mapping[str, Callable[[OpWork], Side | None]]
    missing: Mapping[str, str]


def find_peers(device: str) -> Peers:
    """Those that run here; none on a CPU, where torch itself is the peer."""
    if device != "cuda":
        return Peers({}, {})
    sides: dict[str, Callable[[OpWork], Side | None]] = {
        "scaled_mm": _scaled_mm,
        "grouped_mm": _grouped_mm,
    }
    missing = {"cuDNN": _cudnn_refusal()}
    try:
        interface = import_module("flash_mla.flash_mla_interface")
        sides["FlashMLA"] = lambda work: _flashmla(interface.flash_mla_sparse_fwd, work)
    except Exception as error:
        missing["FlashMLA"] = f"not installed ({type(error).__name__}: {error})"
    return Peers(sides, {name: why for name, why in missing.items() if why})


def _cudnn_refusal() -> str:
    """Why cuDNN's attention does not do this work: it is asked for heads of 512."""
    q = torch.randn(1, 4, 128, 512, device="cuda", dtype=torch.bfloat16)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        return f"has no attention for heads of 512 ({str(error).splitlines()[0][:80]})"
    return "has no sparse lists, and dense attention over the same keys is another operation"


def _flashmla(forward: Callable[..., Any], work: OpWork) -> Side | None:
    """Its sparse prefill: latents and entries as one bf16 list of keys, and int32 lists."""
    if work.op != "attention.sparse_prefill" or work.case.heads % 64:
        return None

    def side(case: Any, call: Call) -> Timed:
        given = named_arguments(work.op, call)
        keys_ND, rows_TN = prefill_lists(case, given)
        missing = -rows_TN.shape[1] % _FLASHMLA_LIST
        rows_TN = torch.nn.functional.pad(rows_TN, (0, missing), value=-1)
        keys_N1D = keys_ND.to(torch.bfloat16).unsqueeze(1)
        rows_T1N = rows_TN.int().unsqueeze(1).contiguous()
        q_THK, sink_H = given["q_THK"], given["sink_H"]
        return lambda: forward(
            q_THK, keys_N1D, rows_T1N, case.score_scale, case.width, sink_H, None, True
        )[0]

    return side


def _scaled_mm(work: OpWork) -> Side | None:
    """torch's product of e4m3 with block scales: activations are rounded to e4m3 beforehand, which
    the operation does not do."""
    if work.op != "linear.fp8_block" or work.case.block != (128, 128):
        return None
    from torch.nn.functional import ScalingType, scaled_mm

    def side(case: Any, call: Call) -> Timed:
        (x_TI,), (codes_OI, _) = call.arguments, call.weights
        rows, columns = x_TI.shape
        x8 = x_TI.to(torch.float8_e4m3fn)
        # Column-major scales of ones: values do not change the time.
        x_scale = torch.ones(columns // 128, rows, device=x_TI.device).T
        w_scale = torch.ones(-(-case.rows // 128), columns // 128, device=x_TI.device)
        return lambda: scaled_mm(
            x8,
            codes_OI.T,
            x_scale,
            ScalingType.BlockWise1x128,
            w_scale.T,
            ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )

    return side


def _grouped_mm(work: OpWork) -> Side | None:
    """torch's grouped products over bf16 experts, rows sorted by expert within the time; rows in
    codes are decoded beforehand."""
    coded = work.op == "moe.experts_fp8_rows"
    if not (coded or work.op == "moe.experts") or work.case.dtype != "bfloat16":
        return None

    def side(case: Any, call: Call) -> Timed:
        *rows_in, ids_TK, weights_TK = call.arguments
        x_TD = decoded_rows(case, *rows_in) if coded else rows_in[0]
        w1, w2, w3 = (
            torch.stack(
                [
                    to_float(case.weight_format, tuple(t[e] for t in weight), case.block).bfloat16()
                    for e in range(case.experts)
                ]
            )
            for weight in call.weights
        )
        up_gate = torch.cat([w1, w3], dim=1).transpose(1, 2)
        down = w2.transpose(1, 2)

        def run() -> torch.Tensor:
            order = ids_TK.flatten().argsort()
            counts = torch.bincount(ids_TK.flatten(), minlength=case.experts)
            ends = counts.cumsum(0).to(torch.int32)
            rows = order // case.selected
            product = torch.nn.functional.grouped_mm
            gate, up = product(x_TD[rows], up_gate, offs=ends).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate.clamp(max=case.limit))
            hidden = hidden * up.clamp(-case.limit, case.limit)
            y = product(hidden, down, offs=ends).float()
            y *= weights_TK.flatten()[order].unsqueeze(1)
            return torch.zeros(x_TD.shape, device=x_TD.device).index_add_(0, rows, y)

        return run

    return side
