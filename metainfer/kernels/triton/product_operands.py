"""What products with weights multiply: tiles of numbers, or of e4m3 codes as the matrix units of a
GPU take them, and the scales of codes.

FORM says in what the units multiply:

- "fp8": both sides are codes, and e4m3 is a type of the GPU;
- "half": both sides are codes, as fp16 numbers that are 2^-8 of what they stand for (`FACTOR`):
  the bits of a code are those of such a number, two instructions a code, exact for each;
- "bf16", "fp32": numbers; a side that is in codes is decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metainfer.kernels.triton.codes import e4m3_to_float, e8m0_to_float


@triton.jit
def operand(x, FORM: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr):  # noqa: PLR0911
    """A tile in memory -> in FORM, fp32 in the interpreter."""
    if x.dtype == tl.uint8:
        if UPCAST:
            number = e4m3_to_float(x, False)
            return number * 0.00390625 if FORM == "half" else number
        elif FORM == "fp8":
            return x.to(tl.float8e4nv, bitcast=True)
        elif FORM == "half":
            return half_of_e4m3(x)
        elif FORM == "bf16":
            return e4m3_to_float(x, FP8).to(tl.bfloat16)
        else:
            return e4m3_to_float(x, FP8)
    elif UPCAST or FORM == "fp32":
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def half_of_e4m3(codes):
    """uint8 codes of numbers -> fp16 of 2^-8 as much. Exponent and mantissa lie where fp16 has
    them, 8 too low; subnormals come right by themselves."""
    wide = codes.to(tl.int8, bitcast=True).to(tl.int16)
    return ((wide << 7) & -0x4001).to(tl.float16, bitcast=True)


@triton.jit
def scale_of(scales):
    """Scales in memory, e8m0 or fp32 -> fp32."""
    if scales.dtype == tl.uint8:
        return e8m0_to_float(scales)
    else:
        return scales


@triton.jit
def step_scales(x_scale_at_M, weight_scale_at, step, GROUP: tl.constexpr, BLOCK_I: tl.constexpr):
    """(scales of rows, of the weight) of the step that begins with a column, as memory holds them:
    loaded a step early and read a step later, nothing waits for them. Without scales of rows those
    of the weight stand for them."""
    weight_scale = tl.load(weight_scale_at + step // BLOCK_I)
    if x_scale_at_M is None:
        return weight_scale, weight_scale
    else:
        return tl.load(x_scale_at_M + step // GROUP), weight_scale


@triton.jit
def factor_of(FORM: tl.constexpr):
    """What products in FORM are to be multiplied with."""
    if FORM == "half":
        return 65536.0
    else:
        return 1.0
