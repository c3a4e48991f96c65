"""Tiles of weights in registers, as numbers that matrix instructions take.

Packed bytes are unpacked four at a time (`code_words`, with `ASM`; not in Triton's interpreter).
One scale serves four bytes that follow each other: layouts of tiles hold at least so many columns
of a group in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.code_words import E2M1_TO_BF16_BY_NIBBLE, E2M1_TO_E4M3_BY_NIBBLE
from metainfer.kernels.triton.codes import e2m1_to_float, e8m0_to_float


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
            E2M1_TO_E4M3_BY_NIBBLE,
            "=&r,=&r,r,r",
            [bytes_NGB, added_NGB],
            (tl.uint8, tl.uint8),
            True,
            4,
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
            E2M1_TO_BF16_BY_NIBBLE, "=&r,=&r,=&r,=&r,r,r,r", [bytes_NGB, scale_NGB],
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
