"""Index keys and queries into codes: norm, rotation, the Hadamard matrix, the encoding, the write.

The Hadamard matrix is a product on the matrix units: its entries are 1 and -1, so products in bf16
are exact and their sums are those of fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from metainfer.kernels.registry import Verdict, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.codes import (
    as_float,
    e2m1_groups,
    e4m3_groups,
    e8m0_to_float,
    packed_pairs,
)
from metainfer.kernels.triton.launch import Launcher, cdiv
from metainfer.kernels.triton.rows import angles, prepared, refused_halves
from metainfer.ops.base import Target
from metainfer.ops.formats import INDEX_FORMATS
from metainfer.ops.index_codes import IndexEncodeCase, IndexWriteCase


@dataclass(frozen=True, slots=True)
class Share:
    """Attributes:
    rows: of a tile; a product has at least 16.
    num_warps: of a program.
    programs: of a multiprocessor at most; each takes tiles in turn.
    """

    rows: int
    num_warps: int
    programs: int


FEW = Share(16, 4, 4)
MANY = Share(64, 8, 4)


@triton.jit
def hadamard_signs(WIDTH: tl.constexpr, FP32: tl.constexpr):
    """[WIDTH, WIDTH] in fp32 or bf16, (-1)^(number of bits that row and column share), put together
    as bits; WIDTH up to 256."""
    shared = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    shared = shared ^ (shared >> 4)
    shared = shared ^ (shared >> 2)
    shared = shared ^ (shared >> 1)
    if FP32:
        return as_float(0x3F800000 | (shared << 31))
    else:
        return (0x3F80 | ((shared & 1) << 15)).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _coded(
    x, codes_ptr, scales_ptr, place, ok, codes_stride, scales_stride,
    CODE: tl.constexpr, GROUP: tl.constexpr, FP32_SCALES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Encode a tile and store its codes and scales at rows `place`, int64 [ROWS, 1]."""
    if CODE == "e4m3":
        codes, scale = e4m3_groups(x, ROWS, WIDTH, GROUP)
        channel = tl.arange(0, WIDTH)[None, :]
        kept = tl.reshape(codes, (ROWS, WIDTH))
        tl.store(codes_ptr + place * codes_stride + channel, kept, ok)
    else:
        codes, scale = e2m1_groups(x, ROWS, WIDTH, GROUP)
        pair = tl.arange(0, WIDTH // 2)[None, :]
        tl.store(codes_ptr + place * codes_stride + pair, packed_pairs(codes, ROWS, WIDTH), ok)
    group = tl.arange(0, WIDTH // GROUP)[None, :]
    scales = e8m0_to_float(scale) if FP32_SCALES else scale.to(tl.uint8)
    tl.store(scales_ptr + place * scales_stride + group, scales, ok)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rows_ptr"])
def _encode(
    x_ptr,
    weight_ptr,
    bias_ptr,
    rotation_ptr,
    codes_ptr,
    scales_ptr,
    rows_ptr,
    rows,
    x_stride,
    codes_stride,
    scales_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    FIRST: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FP32_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A row is one of HEADS heads of a token; it is written at its own number, or at rows_ptr's.
    Programs take tiles in turn, so that each makes the matrix once."""
    if HADAMARD:
        signs = hadamard_signs(WIDTH, UPCAST)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // HEADS, row % HEADS
        start = x_ptr + token.to(tl.int64) * x_stride + head * WIDTH
        x = prepared(
            start, token, row < rows, weight_ptr, bias_ptr, rotation_ptr, eps,
            WIDTH, NORM, WIDTH, FIRST, ROPE, INTERLEAVED, False, ROWS, WIDTH,
        )  # fmt: skip
        if HADAMARD:
            if UPCAST:
                x = tl.dot(x, signs, input_precision="ieee")
            else:
                x = tl.dot(x.to(tl.bfloat16), signs)
            x *= WIDTH**-0.5
        if rows_ptr is not None:
            place = tl.load(rows_ptr + row, row < rows, other=-1)[:, None]
        else:
            place = tl.where(row < rows, row, -1).to(tl.int64)[:, None]
        _coded(
            x, codes_ptr, scales_ptr, place, place >= 0, codes_stride, scales_stride,
            CODE, GROUP, FP32_SCALES, ROWS, WIDTH,
        )  # fmt: skip


def write_index(
    launch: Launcher,
    case: IndexWriteCase,
    x_TI: torch.Tensor,
    weight_I: torch.Tensor | None,
    bias_I: torch.Tensor | None,
    rotation_TR2: torch.Tensor | None,
    codes_MC: torch.Tensor,
    scales_MS: torch.Tensor,
    rows_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = (x_TI, weight_I, bias_I, rotation_TR2)
    _launch(launch, case, inputs, codes_MC, scales_MS, rows_T, case.norm, case.eps)
    return codes_MC, scales_MS


def encode_queries(
    launch: Launcher,
    case: IndexEncodeCase,
    q_THI: torch.Tensor,
    rotation_TR2: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = INDEX_FORMATS[case.format]
    codes_THC, scales_THS = (
        q_THI.new_empty((len(q_THI), case.heads, size), dtype=torch.uint8)
        for size in (form.code_bytes, form.scale_bytes)
    )
    rows = (codes_THC.view(-1, form.code_bytes), scales_THS.view(-1, form.scale_bytes))
    _launch(launch, case, (q_THI, None, None, rotation_TR2), *rows)
    return codes_THC, scales_THS


def _launch(
    launch: Launcher,
    case: IndexWriteCase | IndexEncodeCase,
    inputs: tuple[torch.Tensor | None, ...],
    codes_MC: torch.Tensor,
    scales_MS: torch.Tensor,
    rows_T: torch.Tensor | None = None,
    norm: str = "",
    eps: float = 0.0,
) -> None:
    """The inputs: x, weight, bias and rotation."""
    form = INDEX_FORMATS[case.format]
    fp32_scales = form.scale == "fp32"
    scales = scales_MS.view(torch.float32) if fp32_scales else scales_MS
    heads = getattr(case, "heads", 1)
    x: Any = inputs[0]
    rotation = angles(inputs[3], case.interleaved)
    rows = len(x) * heads
    share = MANY if rows >= MANY.rows * MANY.programs * launch.multiprocessors else FEW
    programs = min(cdiv(rows, share.rows), share.programs * launch.multiprocessors)
    launch(
        _encode,
        (programs,),
        *inputs[:3],
        rotation,
        codes_MC,
        scales,
        rows_T,
        rows,
        x.stride(0),
        codes_MC.stride(0),
        scales.stride(0),
        eps,
        HEADS=heads,
        WIDTH=case.width,
        NORM=norm,
        FIRST=0 if case.leading else case.width - case.rope_width,
        ROPE=case.rope_width,
        INTERLEAVED=case.interleaved,
        HADAMARD=case.hadamard,
        CODE=form.code,
        GROUP=form.block,
        FP32_SCALES=fp32_scales,
        ROWS=share.rows,
        UPCAST=launch.interpreted or case.dtype == "float32",
        num_warps=share.num_warps,
    )


def eligible(case: IndexWriteCase | IndexEncodeCase, target: Target) -> Verdict:
    if case.width != INDEX_FORMATS[case.format].width:
        return no(f"encodes {INDEX_FORMATS[case.format].width} channels, not {case.width}")
    if case.rope_width and not case.interleaved:
        reason = refused_halves(case.rope_width, case.width)
        if reason:
            return no(reason)
    return on_gpu(case, target)


BACKENDS = (
    Declared("cache.write_index", write_index, eligible),
    Declared("index.encode_queries", encode_queries, eligible),
)
