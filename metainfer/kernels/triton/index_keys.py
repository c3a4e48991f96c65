"""Index keys and queries as the products of the indexer want them.

Coded numbers are decoded exactly: e4m3 to bf16 where the GPU has no such type, e2m1 with its e8m0
scales to bf16. A row of e2m1 becomes two halves, its even and its odd channels, as they lie in the
low and the high nibbles: products of both are added, so nothing has to be put in order.

Shape suffixes: N rows; C channels or code bytes of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e2m1_to_float, e4m3_to_float, e8m0_to_float


@triton.jit
def operand_of_e4m3(codes_NC, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """uint8 codes -> e4m3, or bf16 without such a type; fp32 in the interpreter."""
    if UPCAST:
        return e4m3_to_float(codes_NC, FP8)
    elif FP8:
        return codes_NC.to(tl.float8e4nv, bitcast=True)
    else:
        return e4m3_to_float(codes_NC, FP8).to(tl.bfloat16)


@triton.jit
def halves_of_e2m1(codes_NC, scales_N, UPCAST: tl.constexpr):
    """(even, odd) channels, bf16 [N, C] each; fp32 in the interpreter.

    Args:
        codes_NC: uint8, two channels each, C / 4 bytes to a scale.
        scales_N: int32, four e8m0.
    """
    N: tl.constexpr = codes_NC.shape[0]
    C: tl.constexpr = codes_NC.shape[1]
    byte_4 = (tl.arange(0, 4) * 8)[None, :]
    scale_N41 = e8m0_to_float((scales_N[:, None] >> byte_4) & 0xFF)[:, :, None]
    codes_N4B = tl.reshape(codes_NC, [N, 4, C // 4])
    even = tl.reshape(e2m1_to_float(codes_N4B) * scale_N41, [N, C])
    odd = tl.reshape(e2m1_to_float(codes_N4B >> 4) * scale_N41, [N, C])
    if UPCAST:
        return even, odd
    else:
        return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit(
    do_not_specialize=("columns", "table_stride", "first"),
    do_not_specialize_on_alignment=("key_rows",),
)
def order_keys(
    keys, scales, key_rows, out, out_scales, columns, table_stride, first, WIDTH: tl.constexpr,
    FORM: tl.constexpr, KEEP: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK entries, list): lays the keys of each list in order, from entry `first`
    on, as [sequences, columns, WIDTH] numbers of the type of `out`. Entries that are not listed are
    left as memory was.

    Args:
        FORM: of the keys.
        KEEP: e4m3 codes stay codes, and their fp32 scales are written to out_scales.
    """
    sequence = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(
        key_rows + sequence * table_stride + first + column, mask=column < columns, other=-1
    )
    is_there = row >= 0
    to = sequence * columns + column
    out_at = out + to[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if FORM == "index_fp4":
        at = tl.arange(0, WIDTH // 2)[None, :]
        packed = tl.load(keys + row[:, None] * (WIDTH // 2) + at, mask=is_there[:, None], other=0)
        scale = tl.load(scales.to(tl.pointer_type(tl.int32)) + row, mask=is_there, other=0)
        even, odd = halves_of_e2m1(packed, scale, True)
        numbers = tl.reshape(tl.join(even, odd), [BLOCK, WIDTH])
    else:
        at = tl.arange(0, WIDTH)[None, :]
        numbers = tl.load(keys + row[:, None] * WIDTH + at, mask=is_there[:, None], other=0)
        if FORM == "index_fp8":
            scales = scales.to(tl.pointer_type(tl.float32))
            scale = tl.load(scales + row, mask=is_there, other=0.0)
            if KEEP:
                tl.store(out_scales + to, scale, mask=is_there)
            else:
                numbers = e4m3_to_float(numbers, FP8) * scale[:, None]
    tl.store(out_at, numbers.to(out.dtype.element_ty), mask=is_there[:, None])
