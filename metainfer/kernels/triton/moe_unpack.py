"""Tiles of weights in registers, as numbers that matrix instructions take.

Packed bytes become codes four at a time, by byte permutations that look magnitudes up in a table of
eight (`ASM`; not in Triton's interpreter). The table is the same for four bytes that follow each
other: layouts of tiles hold at least so many columns of a group in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e2m1_to_float, e8m0_to_float

# $2: four bytes; $3: four times what is added. The table of e4m3 magnitudes for s = -5, and all of
# it but its zero gets the addend. Selectors come in pairs, low and high nibble of a byte.
TO_E4M3 = tl.constexpr(
    """{
    .reg .b32 c, d, t, v;
    and.b32 t, $3, 0xFFFFFF00;
    add.u32 t, t, 0x14100800;
    add.u32 v, $3, 0x24201C18;
    and.b32 c, $2, 0x77777777;
    shr.u32 d, c, 16;
    prmt.b32 c, t, v, c;
    prmt.b32 d, t, v, d;
    prmt.b32 t, c, d, 0x6420;
    prmt.b32 v, c, d, 0x7531;
    shl.b32 c, $2, 4;
    lop3.b32 $0, c, 0x80808080, t, 0xEA;
    lop3.b32 $1, $2, 0x80808080, v, 0xEA;
    }"""
)
# $4: four bytes; $5 and $6: four scales in bf16. Upper and lower bytes of magnitudes in bf16 are
# looked up apart, signs are spread over the upper ones.
TO_BF16 = tl.constexpr(
    """{
    .reg .b32 c, d, h, l, m, n, s, w, zero;
    mov.b32 zero, 0x80008000;
    and.b32 c, $4, 0x77777777;
    shr.u32 d, c, 16;
    shl.b32 w, $4, 4;
    prmt.b32 h, 0x3F3F3F00, 0x40404040, c;
    prmt.b32 l, 0xC0800000, 0xC0804000, c;
    prmt.b32 m, 0x3F3F3F00, 0x40404040, d;
    prmt.b32 n, 0xC0800000, 0xC0804000, d;
    prmt.b32 s, w, $4, 0x5140;
    lop3.b32 h, s, 0x80808080, h, 0xEA;
    prmt.b32 s, w, $4, 0x7362;
    lop3.b32 m, s, 0x80808080, m, 0xEA;
    prmt.b32 c, l, h, 0x6240;
    prmt.b32 d, n, m, 0x6240;
    prmt.b32 s, l, h, 0x7351;
    prmt.b32 w, n, m, 0x7351;
    fma.rn.bf16x2 $0, c, $5, zero;
    fma.rn.bf16x2 $1, d, $6, zero;
    fma.rn.bf16x2 $2, s, $5, zero;
    fma.rn.bf16x2 $3, w, $6, zero;
    }"""
)


@triton.jit
def _e4m3_code(nibbles, added):
    """int32 nibbles of e2m1 -> uint8 codes, plainly."""
    magnitude = nibbles & 7
    normal = tl.where(magnitude == 1, 0x08, 0x08 + magnitude * 4) + added
    code = tl.where(magnitude == 0, 0, normal) | ((nibbles & 8) << 4)
    return code.to(tl.uint8)


@triton.jit
def unpacked_codes(bytes_NGB, added_NG, ASM: tl.constexpr):
    """uint8 [N, G, 16] packed, uint8 [N, G] -> e4m3 codes, uint8 [N, 32 G]."""
    N: tl.constexpr = bytes_NGB.shape[0]
    G: tl.constexpr = bytes_NGB.shape[1]
    if ASM:
        added_NGB = tl.broadcast_to(added_NG[:, :, None], (N, G, 16))
        low, high = tl.inline_asm_elementwise(
            TO_E4M3, "=&r,=&r,r,r", [bytes_NGB, added_NGB], (tl.uint8, tl.uint8), True, 4
        )
    else:
        added = added_NG.to(tl.int32)[:, :, None]
        low = _e4m3_code(bytes_NGB.to(tl.int32) & 15, added)
        high = _e4m3_code(bytes_NGB.to(tl.int32) >> 4, added)
    return _in_order(low, high)


@triton.jit
def unpacked_numbers(
    bytes_NGB, scales_NG, FOLDED: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr
):
    """uint8 [N, G, 16] packed, uint8 [N, G], e8m0 or what is added (FOLDED) -> numbers [N, 32 G],
    bf16 or fp32."""
    N: tl.constexpr = bytes_NGB.shape[0]
    G: tl.constexpr = bytes_NGB.shape[1]
    wide_NG = scales_NG.to(tl.int32)
    if FOLDED:
        wide_NG = (wide_NG >> 3) + (127 - 5)
    if ASM and BF16:
        bits_NG = tl.where(wide_NG == 255, 0x7FC0, tl.maximum(wide_NG << 7, 0x40)).to(tl.int16)
        scale_NGB = tl.broadcast_to(bits_NG.to(tl.bfloat16, bitcast=True)[:, :, None], (N, G, 16))
        low, high = tl.inline_asm_elementwise(
            TO_BF16, "=&r,=&r,=&r,=&r,r,r,r", [bytes_NGB, scale_NGB],
            (tl.bfloat16, tl.bfloat16), True, 4,
        )  # fmt: skip
    else:
        scale = e8m0_to_float(wide_NG)[:, :, None]
        low = e2m1_to_float(bytes_NGB & 15) * scale
        high = e2m1_to_float(bytes_NGB >> 4) * scale
        if BF16:
            low = low.to(tl.bfloat16)
            high = high.to(tl.bfloat16)
    return _in_order(low, high)


@triton.jit
def _in_order(low, high):
    """[N, G, 16] of columns 0 .. 15 and 16 .. 31 of groups -> [N, 32 G]."""
    N: tl.constexpr = low.shape[0]
    G: tl.constexpr = low.shape[1]
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (N, G * 32))
