"""Rows of a cache as keys: from bytes of a format to numbers.

Shape suffixes: N rows; G blocks of channels that share a scale; C channels of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e2m1_to_float, e4m3_to_float, e8m0_to_float
from metainfer.kernels.triton.launch import Launcher, cdiv, has_fp8
from metainfer.ops.attention import DENSE
from metainfer.ops.formats import FORMATS


@triton.jit
def key_rows(
    at_N, there_N, D: tl.constexpr, CODED: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr, PLAIN_AT: tl.constexpr, SCALES_AT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """fp32 [N, D]: the first D channels of the rows that begin at the addresses at_N (of bytes);
    0 where there_N says that there is none. Constants: `ops/formats.py` and `format_constants`."""
    BN: tl.constexpr = at_N.shape[0]
    BLOCKS: tl.constexpr = D // BLOCK
    CODED_BLOCKS: tl.constexpr = CODED // BLOCK
    g_G = tl.arange(0, BLOCKS)[None, :]
    is_code_NG = there_N[:, None] & (g_G < CODED_BLOCKS)
    at_NG1 = at_N[:, None, None]
    if CODE == "e4m3":
        c_C = g_G[:, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        codes_NGC = tl.load(at_NG1 + c_C, mask=is_code_NG[:, :, None], other=0)
        x_NGC = e4m3_to_float(codes_NGC, FP8)
    else:
        c_C = g_G[:, :, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, None, :]
        codes_NGC = tl.load(at_NG1 + c_C, mask=is_code_NG[:, :, None], other=0)
        low_NGC, high_NGC = e2m1_to_float(codes_NGC), e2m1_to_float(codes_NGC >> 4)
        x_NGC = tl.reshape(tl.join(low_NGC, high_NGC), [BN, BLOCKS, BLOCK])
    if SCALE == "fp32":
        scale_at_N1 = (at_N[:, None] + SCALES_AT).to(tl.pointer_type(tl.float32))
        scale_NG = tl.load(scale_at_N1 + g_G, mask=is_code_NG, other=0.0)
    else:
        scale_NG = tl.load(at_N[:, None] + SCALES_AT + g_G, mask=is_code_NG, other=0)
        scale_NG = e8m0_to_float(scale_NG) if SCALE == "e8m0" else e4m3_to_float(scale_NG, FP8)
    x_NGC = x_NGC * scale_NG[:, :, None]
    if CODED < D:
        plain_C = (g_G[:, :, None] - CODED_BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        plain_at_NG1 = (at_NG1 + PLAIN_AT).to(tl.pointer_type(tl.bfloat16))
        is_plain_NG = there_N[:, None] & (g_G >= CODED_BLOCKS)
        plain_NGC = tl.load(plain_at_NG1 + plain_C, mask=is_plain_NG[:, :, None], other=0.0)
        x_NGC = tl.where(is_plain_NG[:, :, None], plain_NGC.to(tl.float32), x_NGC)
    return tl.reshape(x_NGC, [BN, D])


@triton.jit(
    do_not_specialize=("columns", "table_stride"), do_not_specialize_on_alignment=("table", "seen")
)
def decode_listed(
    entries, table, seen, out, columns, entry_stride, table_stride,
    BN: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr, CODED: tl.constexpr,
    CODE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, PLAIN_AT: tl.constexpr,
    SCALES_AT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (BN entries, sequence b): numbers of the first seen[b] entries of each sequence."""
    b = tl.program_id(1).to(tl.int64)
    name_N = tl.program_id(0) * BN + tl.arange(0, BN)
    there_N = name_N < tl.load(seen + b)
    row_N = tl.load(table + b * table_stride + name_N, mask=there_N, other=0)
    at_N = tl.multiple_of(entries + row_N * entry_stride, 16)
    x_ND = key_rows(
        at_N, there_N, D, CODED, CODE, BLOCK, SCALE, PLAIN_AT, SCALES_AT, FP8
    )  # fmt: skip
    to_N1 = out + (b * columns + name_N)[:, None] * (D + EXTRA)
    tl.store(to_N1 + tl.arange(0, D)[None, :], x_ND.to(out.dtype.element_ty), mask=there_N[:, None])
    if EXTRA > 0:
        x_X = tl.arange(0, EXTRA)[None, :]
        plain_at_N1 = (at_N[:, None] + PLAIN_AT).to(tl.pointer_type(tl.bfloat16))
        plain_NX = tl.load(plain_at_N1 + x_X, mask=there_N[:, None], other=0.0)
        tl.store(to_N1 + D + x_X, plain_NX.to(out.dtype.element_ty), mask=there_N[:, None])


def format_constants(launch: Launcher, name: str, width: int) -> dict[str, Any]:
    """Constants of `key_rows` for the first `width` channels of a format's rows."""
    if name == DENSE:
        return {"CODED": 0, "CODE": "", "BLOCK": 1, "SCALE": "", "PLAIN_AT": 0, "SCALES_AT": 0,
                "FP8": False}  # fmt: skip
    row = FORMATS[name]
    return {
        "CODED": min(row.coded, width),
        "CODE": row.code,
        "BLOCK": row.block,
        "SCALE": row.scale,
        "PLAIN_AT": row.plain_at,
        "SCALES_AT": row.scales_at,
        "FP8": has_fp8(launch),
    }


def decoded(
    launch: Launcher, name: str, entries: torch.Tensor, rows_BE: torch.Tensor,
    seen_B: torch.Tensor, width: int, extra: int, dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """[B * E, width + extra]: the entries that a table lists, decoded, those of each sequence from
    seen_B on left as memory was."""
    sequences, columns = rows_BE.shape
    out = torch.empty(sequences * columns, width + extra, dtype=dtype, device=entries.device)
    launch(
        decode_listed,
        (cdiv(columns, 16), sequences),
        entries,
        rows_BE,
        seen_B,
        out,
        columns,
        entries.stride(0),
        rows_BE.stride(0),
        num_warps=4,
        BN=16,
        D=width,
        EXTRA=extra,
        **format_constants(launch, name, width),
    )
    return out
