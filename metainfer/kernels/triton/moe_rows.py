"""Steps over rows beside the products of experts: activations, codes as numbers, and the sum of
what a row's experts gave."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.codes import e4m3_to_float, e8m0_to_float
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from metainfer.kernels.triton.moe_product import gated, leave_codes
from metainfer.kernels.triton.rows import rounded, rounded_to_bf16
from metainfer.ops.base import Target
from metainfer.ops.moe import SwigluCase, SwigluFp8Case

_BLOCK = 1024  # channels of a program


@triton.jit(do_not_specialize=["rows"])
def activate(
    x_ptr,
    y_ptr,
    scales_ptr,
    rows,
    limit,
    F: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    INSIDE: tl.constexpr,
    BF16: tl.constexpr,
    R: tl.constexpr,
    BF: tl.constexpr,
):
    """Rows of gate and up [2 F], or (not GATED) of activations [F]: as numbers, as codes with
    scales, or rounded to codes (INSIDE as of `grouped_product`)."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    n0 = tl.program_id(1) * BF
    n_N = n0 + tl.arange(0, BF)
    wide_R = row_R.to(tl.int64)
    ok = (row_R < rows)[:, None] & (n_N < F)[None, :]
    WIDTH: tl.constexpr = 2 * F if GATED else F
    at = x_ptr + wide_R[:, None] * WIDTH + n_N[None, :]
    y = tl.load(at, ok, 0.0).to(tl.float32)
    if GATED:
        y = gated(y, tl.load(at + F, ok, 0.0).to(tl.float32), limit)
        if BF16:
            y = rounded_to_bf16(y)
    if INSIDE == "":
        y = rounded(y, y_ptr)
        tl.store(y_ptr + wide_R[:, None] * F + n_N[None, :], y.to(y_ptr.dtype.element_ty), ok)
    else:
        leave_codes(y, y_ptr, scales_ptr, wide_R, n0, row_R < rows, F, R, BF, GROUP, E8M0, INSIDE)


@triton.jit(do_not_specialize=["rows"])
def decode_groups(
    codes_ptr,
    scales_ptr,
    y_ptr,
    rows,
    stride,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    BD: tl.constexpr,
):
    """e4m3 codes and scales of groups -> numbers [rows, D], exactly."""
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)
    codes = tl.load(codes_ptr + row * stride + d_D, d_D < D, 0)
    scale = tl.load(scales_ptr + row * (D // GROUP) + d_D // GROUP, d_D < D, 0)
    if E8M0:
        scale = e8m0_to_float(scale)
    numbers = e4m3_to_float(codes, False) * scale
    tl.store(y_ptr + row * D + d_D, numbers.to(y_ptr.dtype.element_ty), d_D < D)


@triton.jit(do_not_specialize=["rows"])
def add_slots(
    parts_ptr,
    ids_ptr,
    y_ptr,
    rows,
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Adds the K slots of each row that have an expert, in order -> fp32."""
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BD + tl.arange(0, BD)
    total_D = tl.zeros([BD], tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + row * K + k)
        columns = tl.where((expert >= 0) & (expert < E), D, 0)
        part_D = tl.load(parts_ptr + (row * K + k) * D + d_D, d_D < columns, 0.0)
        total_D += part_D.to(tl.float32)
    tl.store(y_ptr + row * D + d_D, total_D, d_D < D)


def _channels(width: int, group: int) -> int:
    """Channels of a program: whole groups."""
    return min(_BLOCK, max(group, next_power_of_2(width)))


def swiglu(launch: Launcher, case: SwigluCase, gate_up_TF: torch.Tensor) -> torch.Tensor:
    y_TF = gate_up_TF.new_empty(len(gate_up_TF), case.inner, dtype=TORCH_DTYPES[case.dtype])
    _activate(launch, case, gate_up_TF, True, "", y_TF, None)
    return y_TF


def swiglu_fp8(
    launch: Launcher, case: SwigluFp8Case, gate_up_TF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return coded(launch, case, gate_up_TF, True)


def coded(
    launch: Launcher, case: SwigluFp8Case, x: torch.Tensor, is_gate_up: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, F] and scales [T, F / group] of gate and up [T, 2 F], or of activations [T, F]."""
    kept = torch.uint8 if case.scale == "e8m0" else torch.float32
    codes_TF = x.new_empty(len(x), case.inner, dtype=torch.uint8)
    scales_TG = x.new_empty(len(x), case.inner // case.group, dtype=kept)
    _activate(launch, case, x, is_gate_up, "codes", codes_TF, scales_TG)
    return codes_TF, scales_TG


def through_codes(launch: Launcher, case: SwigluFp8Case, x_TF: torch.Tensor) -> torch.Tensor:
    """Activations [T, F] as the numbers that their codes stand for, in their own format."""
    y_TF = torch.empty_like(x_TF)
    _activate(launch, case, x_TF, False, "rounded", y_TF, None)
    return y_TF


def _activate(
    launch: Launcher,
    case: SwigluCase | SwigluFp8Case,
    x: torch.Tensor,
    is_gate_up: bool,
    inside: str,
    y_TF: torch.Tensor,
    scales_TG: torch.Tensor | None,
) -> None:
    rows, group = len(x), getattr(case, "group", 1)
    block = _channels(case.inner, group)
    together = 1 if rows < 256 else max(1, min(4, 2048 // block))
    launch(
        activate,
        (cdiv(rows, together), cdiv(case.inner, block)),
        x,
        y_TF,
        scales_TG,
        rows,
        float(case.limit),
        num_warps=4,
        F=case.inner,
        GATED=is_gate_up,
        GROUP=group,
        E8M0=getattr(case, "scale", "") == "e8m0",
        INSIDE=inside,
        BF16=case.dtype == "bfloat16",
        R=together,
        BF=block,
    )


def decoded(
    launch: Launcher,
    group: int,
    dtype: torch.dtype,
    codes_TD: torch.Tensor,
    scales_TG: torch.Tensor,
) -> torch.Tensor:
    """Rows in codes as numbers [T, D]; bf16 holds them exactly."""
    rows, width = codes_TD.shape
    y_TD = codes_TD.new_empty(rows, width, dtype=dtype)
    block = _channels(width, group)
    launch(
        decode_groups,
        (rows, cdiv(width, block)),
        codes_TD,
        scales_TG,
        y_TD,
        rows,
        codes_TD.stride(0),
        num_warps=4,
        D=width,
        GROUP=group,
        E8M0=scales_TG.dtype is torch.uint8,
        BD=block,
    )
    return y_TD


def added(
    launch: Launcher, experts: int, ids_TK: torch.Tensor, parts: torch.Tensor
) -> torch.Tensor:
    """[T K, D] -> fp32 [T, D]."""
    (rows, selected), width = ids_TK.shape, parts.shape[1]
    y_TD = parts.new_empty(rows, width, dtype=torch.float32)
    block = _channels(width, 1)
    launch(
        add_slots,
        (rows, cdiv(width, block)),
        parts,
        ids_TK,
        y_TD,
        rows,
        num_warps=4,
        E=experts,
        K=selected,
        D=width,
        BD=block,
    )
    return y_TD


def eligible_fp8(case: SwigluFp8Case, target: Target) -> Verdict:
    if case.group & (case.group - 1) or case.inner % case.group:
        return no(f"wants groups that are a power of two and fill {case.inner} channels")
    return on_gpu(case, target)


BACKENDS = (
    Declared("moe.swiglu", swiglu),
    Declared("moe.swiglu_fp8", swiglu_fp8, eligible_fp8),
)
