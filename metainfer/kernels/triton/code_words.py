"""Codes in 32-bit registers -> other numbers in registers, as PTX to have inline.

Four or eight codes at a time, by integer operations on pairs and by byte permutations that look
magnitudes up in a table of eight: every GPU does these equally fast, with or without a type for
codes. Results are $0, $1, ..., operands come behind them. Products of bf16 are sums with -0, which
keep the sign of zero.
"""

from __future__ import annotations

import triton.language as tl

# $2: four codes; $3: the scale twice. Codes become the upper bytes of halves; exponent and
# mantissa move four bits down from the sign; times 2^120, and times the scale.
E4M3_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, s, t, big, zero;
    mov.b32 big, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 s, a, zero;
    and.b32 t, b, zero;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    and.b32 a, a, 0x07F007F0;
    and.b32 b, b, 0x07F007F0;
    or.b32 a, a, s;
    or.b32 b, b, t;
    fma.rn.bf16x2 a, a, big, zero;
    fma.rn.bf16x2 b, b, big, zero;
    fma.rn.bf16x2 $0, a, $3, zero;
    fma.rn.bf16x2 $1, b, $3, zero;
    }"""
)

# $4: eight codes in four bytes. Codes without signs choose upper (h, m) and lower bytes (l, n) of
# magnitudes in bf16, and signs are put into the upper ones: h and l have the four codes of bytes 0
# and 1, m and n those of bytes 2 and 3, the low nibble of a byte first.
_E2M1_BYTES = """{
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
"""
# $5: the scale twice. Results in the order of codes.
E2M1_TO_BF16 = tl.constexpr(
    _E2M1_BYTES
    + """
    prmt.b32 c, l, h, 0x5140;
    prmt.b32 d, l, h, 0x7362;
    prmt.b32 s, n, m, 0x5140;
    prmt.b32 w, n, m, 0x7362;
    fma.rn.bf16x2 $0, c, $5, zero;
    fma.rn.bf16x2 $1, d, $5, zero;
    fma.rn.bf16x2 $2, s, $5, zero;
    fma.rn.bf16x2 $3, w, $5, zero;
    }"""
)
# $5 and $6: scales of the four bytes. Two results of low nibbles, then two of high ones.
E2M1_TO_BF16_BY_NIBBLE = tl.constexpr(
    _E2M1_BYTES
    + """
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

# $2: eight codes in four bytes; $3: four times what is added, which is 8 (s + 5) where 2^s is the
# scale. The table of e4m3 magnitudes is that for s = -5, and all of it but its zero gets the
# addend. Low nibbles in the first result.
E2M1_TO_E4M3_BY_NIBBLE = tl.constexpr(
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
