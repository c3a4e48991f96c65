"""Codes of 8 and 4 bits in kernels: to fp32 and back, exactly, with and without a type for them.

Bytes are uint8 tensors. `FP8` says whether decoding may use e4m3 as a type (`launch.has_fp8`);
without it bits are moved by integers, which every GPU and the interpreter do alike. Encoding always
does: Triton's cast of fp32 to e4m3 rounds twice on GPUs (seen on an H200). Meanings, ties and what
NaN becomes: `ops/formats.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.ops.formats import FP4_FLOOR, FP8_FLOOR

_FP8_FLOOR = tl.constexpr(FP8_FLOOR)
_FP4_FLOOR = tl.constexpr(FP4_FLOOR)


@triton.jit
def as_bits(x):
    """fp32 -> the same bits as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """int32 -> the same bits as fp32."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_to_float(codes, FP8: tl.constexpr):
    """uint8 -> fp32; 0x7F and 0xFF are NaN (but 480 in the interpreter with `FP8`)."""
    if FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Exponent and mantissa where fp32 has them, 120 too low: subnormals come right by
        # themselves.
        wide = codes.to(tl.int32)
        number = as_float(((wide & 0x80) << 24) | ((wide & 0x7F) << 20)) * 1.329227995784916e36
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def _nearest(magnitude, MANTISSA: tl.constexpr, NORMAL: tl.constexpr):
    """fp32 >= 0 -> int32 code of a float with MANTISSA bits of mantissa, whose smallest normal
    number is NORMAL as the bits of an fp32; to nearest, ties to even."""
    # Steps between codes are those between floats 23 - MANTISSA powers of two higher up.
    SHIFT: tl.constexpr = 23 - MANTISSA
    power = tl.maximum(as_bits(magnitude) & 0x7F800000, NORMAL)
    above = power + (SHIFT << 23)
    steps = as_bits(magnitude + as_float(above)) - above
    return steps + ((power - NORMAL) >> SHIFT)


@triton.jit
def float_to_e4m3(x):
    """fp32 that is no NaN -> uint8, to nearest, ties to even, saturating."""
    code = _nearest(tl.minimum(tl.abs(x), 448.0), 3, 0x3C800000)  # 2^-6
    return (code | ((as_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1_to_float(codes):
    """Integers of which the low four bits count -> fp32."""
    wide = codes.to(tl.int32)
    bits = ((wide & 8) << 28) | ((wide & 7) << 22)
    return as_float(bits) * 8.507059173023462e37  # 2^126


@triton.jit
def float_to_e2m1(x):
    """fp32 that is no NaN -> int32 of 0 .. 15, to nearest, ties to even, saturating."""
    code = _nearest(tl.minimum(tl.abs(x), 6.0), 1, 0x3F800000)  # 1
    return code | ((as_bits(x) >> 28) & 8)


@triton.jit
def e8m0_to_float(scales):
    """uint8 -> fp32; 255 is NaN, 0 is 2^-127."""
    wide = scales.to(tl.int32)
    number = as_float(tl.where(wide == 0, 0x400000, wide << 23))
    return tl.where(wide == 255, float("nan"), number)


@triton.jit
def amax_bits(x, AXIS: tl.constexpr):
    """fp32 -> int32, the bits of the largest magnitude along an axis: more than 0x7F800000 where
    there is a NaN. Bits of magnitudes are in the order of the magnitudes."""
    return tl.max(as_bits(x) & 0x7FFFFFFF, axis=AXIS)


@triton.jit
def e8m0_of_amax(bits, floor, CODE: tl.constexpr):
    """Scales of blocks: int32 bits of the largest magnitudes -> int32 bytes b of 2^(b - 127) =
    2^ceil(log2(max(amax, floor) / largest code)); 255 where amax is NaN.

    The largest e4m3 is 1.75 * 2^8 and the largest e2m1 1.5 * 2^2, so the power goes up by one where
    the mantissa passes .75 or .5, and no division rounds.

    Args:
        floor: smallest amax, positive.
        CODE: "e4m3" or "e2m1".
    """
    kept = tl.minimum(tl.maximum(bits, as_bits(tl.full([], floor, tl.float32))), 0x7F800000)
    past: tl.constexpr = 0x1FFFFF if CODE == "e4m3" else 0x3FFFFF
    power: tl.constexpr = 8 if CODE == "e4m3" else 2
    return tl.where(bits > 0x7F800000, 255, ((kept + past) >> 23) - power)


@triton.jit
def e8m0_inverse(scale):
    """int32 bytes b from 1 to 253 -> fp32 2^(127 - b), to multiply with; 0 for 255."""
    return as_float(tl.where(scale == 255, 0, (254 - scale) << 23))


@triton.jit
def e4m3_groups(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """fp32 [ROWS, BLOCK] -> codes uint8 [ROWS, BLOCK / GROUP, GROUP] and the bytes b of their
    scales 2^(b - 127), int32 [ROWS, BLOCK / GROUP]; codes of zero and 255 for a group with NaN."""
    groups = tl.reshape(x, (ROWS, BLOCK // GROUP, GROUP))
    scale = e8m0_of_amax(amax_bits(groups, 2), _FP8_FLOOR, "e4m3")
    scaled = groups * e8m0_inverse(scale)[:, :, None]
    return float_to_e4m3(tl.where((scale == 255)[:, :, None], 0.0, scaled)), scale


@triton.jit
def e2m1_groups(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """fp32 [ROWS, BLOCK] -> codes int32 [ROWS, BLOCK / GROUP, GROUP] and the bytes b of their
    scales 2^(b - 127), int32 [ROWS, BLOCK / GROUP]; codes of zero and 255 for a group with NaN."""
    groups = tl.reshape(x, (ROWS, BLOCK // GROUP, GROUP))
    scale = e8m0_of_amax(amax_bits(groups, 2), _FP4_FLOOR, "e2m1")
    scaled = groups * e8m0_inverse(scale)[:, :, None]
    return float_to_e2m1(tl.where((scale == 255)[:, :, None], 0.0, scaled)), scale


@triton.jit
def e2m1_groups_by_e4m3(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """As `e2m1_groups`, with uint8 scales in e4m3, and these as fp32 too."""
    groups = tl.reshape(x, (ROWS, BLOCK // GROUP, GROUP))
    bits = amax_bits(groups, 2)
    none = bits > 0x7F800000
    sixth = tl.div_rn(as_float(bits), tl.full([ROWS, BLOCK // GROUP], 6.0, tl.float32))
    scale = float_to_e4m3(tl.where(none, 1.0, tl.maximum(sixth, 0.001953125)))
    value = e4m3_to_float(scale, False)
    scaled = tl.div_rn(groups, value[:, :, None])
    codes = float_to_e2m1(tl.where(none[:, :, None], 0.0, scaled))
    return codes, tl.where(none, 0x7F, scale).to(tl.uint8), tl.where(none, float("nan"), value)


@triton.jit
def packed_pairs(codes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of four bits -> uint8 [ROWS, BLOCK / 2], the even channel in the low nibble."""
    even, odd = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)
