"""attention.merge in Triton, which also merges the parts into which decode splits its keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.ops.attention import MergeCase


@triton.jit(do_not_specialize=["shards", "pairs"])
def merge_shards(
    parts, part_lse, out, lse, shards, pairs,
    D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Program (pair of row and head, BD channels); BS shards at a time, in their order.

    Args:
        parts, part_lse: [shards, pairs, D] and [shards, pairs].
        out, lse: [pairs, D] and [pairs].
    """
    pair = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    s_S = tl.arange(0, BS)
    top = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    acc_D = tl.zeros([BD], tl.float32)
    for first in range(0, shards, BS):
        at_S = (first + s_S) * tl.cast(pairs, tl.int64) + pair
        is_shard_S = first + s_S < shards
        lse_S = tl.load(part_lse + at_S, mask=is_shard_S, other=float("-inf"))
        lse_S *= 1.4426950408889634
        part_SD = tl.load(
            parts + at_S[:, None] * D + d_D, mask=is_shard_S[:, None] & (d_D < D), other=0.0
        ).to(tl.float32)
        new = tl.maximum(top, tl.max(lse_S, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight_S = tl.exp2(lse_S - safe)
        old = tl.exp2(top - safe)
        mass = mass * old + tl.sum(weight_S, 0)
        acc_D = acc_D * old + tl.sum(part_SD * weight_S[:, None], 0)
        top = new
    mass = tl.where(mass > 0, mass, 1.0)  # top is -inf then and acc 0
    to_D = out + pair * D + tl.program_id(1) * BD + tl.arange(0, BD)
    is_channel_D = tl.program_id(1) * BD + tl.arange(0, BD) < D
    tl.store(to_D, (acc_D / mass).to(out.dtype.element_ty), mask=is_channel_D)
    if LSE and tl.program_id(1) == 0:
        tl.store(lse + pair, (top + tl.log2(mass)) * 0.6931471805599453)


def merge_into(
    launch: Launcher,
    out_STHD: torch.Tensor,
    lse_STH: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor | None,
) -> None:
    """The shards' results merged into out_THD and, where it is wanted, lse_TH."""
    shards, rows, heads, width = out_STHD.shape
    # Few programs of many shards are slow: each takes a part of the channels.
    channels = min(128, next_power_of_2(width))
    launch(
        merge_shards,
        (rows * heads, cdiv(width, channels)),
        out_STHD,
        lse_STH,
        out_THD,
        lse_TH,
        shards,
        rows * heads,
        num_warps=1 if shards <= 4 else 4,
        D=width,
        BS=4 if shards <= 4 else 32,
        BD=channels,
        LSE=lse_TH is not None,
    )


def run(
    launch: Launcher, case: MergeCase, out_STHD: torch.Tensor, lse_STH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out_THD = out_STHD.new_empty(out_STHD.shape[1:], dtype=TORCH_DTYPES[case.dtype])
    lse_TH = lse_STH.new_empty(lse_STH.shape[1:])
    merge_into(launch, out_STHD.contiguous(), lse_STH.contiguous(), out_THD, lse_TH)
    return out_THD, lse_TH


BACKENDS = (Declared("attention.merge", run),)
