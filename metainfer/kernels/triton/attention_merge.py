"""attention.merge in Triton, which also merges the parts into which decode splits its keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher
from metainfer.ops.attention import MergeCase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@triton.jit(do_not_specialize=["shards", "pairs"])
def merge_shards(
    parts, part_lse, out, lse, shards, pairs,
    D: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Program (BP pairs of row and head, BD channels); BS shards at a time, in their order.

    Args:
        parts, part_lse: [shards, pairs, D] and [shards, pairs].
        out, lse: [pairs, D] and [pairs].
    """
    pair_P = tl.program_id(0) * BP + tl.arange(0, BP)
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)
    s_S = tl.arange(0, BS)
    is_pair_P = pair_P < pairs
    here_PD = is_pair_P[:, None] & (d_D < D)[None, :]
    top_P = tl.full([BP], float("-inf"), tl.float32)
    mass_P = tl.zeros([BP], tl.float32)
    acc_PD = tl.zeros([BP, BD], tl.float32)
    for first in range(0, shards, BS):
        at_SP = (first + s_S)[:, None] * tl.cast(pairs, tl.int64) + pair_P[None, :]
        there_SP = (first + s_S < shards)[:, None] & is_pair_P[None, :]
        lse_SP = tl.load(part_lse + at_SP, mask=there_SP, other=float("-inf"))
        lse_SP *= 1.4426950408889634
        part_SPD = tl.load(
            parts + at_SP[:, :, None] * D + d_D[None, None, :],
            mask=there_SP[:, :, None] & (d_D < D)[None, None, :],
            other=0.0,
        ).to(tl.float32)
        new_P = tl.maximum(top_P, tl.max(lse_SP, 0))
        safe_P = tl.where(new_P == float("-inf"), 0.0, new_P)
        weight_SP = tl.exp2(lse_SP - safe_P[None, :])
        old_P = tl.exp2(top_P - safe_P)
        mass_P = mass_P * old_P + tl.sum(weight_SP, 0)
        acc_PD = acc_PD * old_P[:, None] + tl.sum(part_SPD * weight_SP[:, :, None], 0)
        top_P = new_P
    mass_P = tl.where(mass_P > 0, mass_P, 1.0)  # top is -inf then and acc 0
    to_PD = out + pair_P.to(tl.int64)[:, None] * D + d_D[None, :]
    tl.store(to_PD, (acc_PD / mass_P[:, None]).to(out.dtype.element_ty), mask=here_PD)
    if LSE and tl.program_id(1) == 0:
        tl.store(lse + pair_P, (top_P + tl.log2(mass_P)) * 0.6931471805599453, mask=is_pair_P)


def merge_into(
    launch: Launcher,
    out_STHD: torch.Tensor,
    lse_STH: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor | None,
) -> None:
    """The shards' results merged into out_THD and, where it is wanted, lse_TH."""
    shards, rows, heads, width = out_STHD.shape
    # Of few shards a program takes several pairs, or it would be too small; of many, a part of the
    # channels, or few programs would read all of it. Either way it has 32 KB on their way.
    few = shards <= 4
    channels = min(512 if few else 128, triton.next_power_of_2(width))
    pairs = 4 if few and rows * heads >= 4 * launch.multiprocessors else 1
    launch(
        merge_shards,
        (triton.cdiv(rows * heads, pairs), triton.cdiv(width, channels)),
        out_STHD,
        lse_STH,
        out_THD,
        lse_TH,
        shards,
        rows * heads,
        num_warps=4,
        D=width,
        BP=pairs,
        BS=(2 if shards <= 2 else 4) if few else 32,
        BD=channels,
        LSE=lse_TH is not None,
    )


def run(
    launch: Launcher, case: MergeCase, out_STHD: torch.Tensor, lse_STH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out_THD = out_STHD.new_empty(out_STHD.shape[1:], dtype=_DTYPES[case.dtype])
    lse_TH = lse_STH.new_empty(lse_STH.shape[1:])
    merge_into(launch, out_STHD.contiguous(), lse_STH.contiguous(), out_THD, lse_TH)
    return out_THD, lse_TH


BACKENDS = (Declared("attention.merge", run),)
