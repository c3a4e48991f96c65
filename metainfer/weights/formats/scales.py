"""e8m0 scales: a byte b means 2^(b - 127); 255 is NaN.

Scale bytes are kept as uint8, the view of the file's F8_E8M0, since that runs on every card.
"""

from __future__ import annotations

import torch

E8M0_NAN = 255


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """uint8 scale bytes of any shape -> fp32, exactly; byte 0 is 2^-127 (subnormal), 255 NaN."""
    # A byte is the exponent field of an fp32 number, except at both ends of the range.
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 1 << 22, bits)
    bits = torch.where(scale == E8M0_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32)


def scale_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Scales as stored (uint8 e8m0 bytes, or fp32) -> fp32."""
    return decode_e8m0(scale) if scale.dtype is torch.uint8 else scale.to(torch.float32)


def covering_e8m0(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The released rule 2^ceil(log2(amax / largest)), as uint8 bytes of `amax`'s shape.

    Args:
        amax: fp32, the largest magnitude of each block; blocks of zeros get the scale 1.
        largest: the largest magnitude that the codes express (448 for e4m3, 6 for e2m1).
    """
    # Exponents are compared as integers: a logarithm would round near powers of two.
    limit_mantissa, limit_exponent = torch.frexp(torch.tensor(largest, dtype=torch.float32))
    mantissa, exponent = torch.frexp(amax.to(torch.float32))
    exponent = exponent - limit_exponent + (mantissa > limit_mantissa).to(exponent.dtype)
    exponent = torch.where(amax == 0, 0, exponent)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)
