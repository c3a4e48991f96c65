"""Contract of activations as fp8 groups."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance
from metainfer.ops.formats import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class QuantiseFp8Case:
    """Attributes:
    heads, width: H and D, 1 head for plain rows; the width is a multiple of the group.
    group: channels per scale, 32 or 128.
    scale: "e8m0", a byte each, or "fp32"; powers of two in both.
    rope_width: how many of the last channels of each head are rotated back first; 0 for none.
    dtype: format of x, and of what is quantised.
    """

    heads: int
    width: int
    group: int = 128
    scale: str = "e8m0"
    rope_width: int = 0
    dtype: str = "bfloat16"


def _cost(case: QuantiseFp8Case, load: Load) -> Cost:
    elements = load.rows * case.heads * case.width
    each = ELEMENT_BYTES[case.dtype] + 1 + SCALE_BYTES[case.scale] / case.group
    moved = elements * each + 4 * load.rows * case.rope_width
    return Cost(flops=2 * elements, bytes=moved)


FP8 = Op(
    name="quantise.fp8",
    doc="""Rows to e4m3 codes with a scale for each group of channels (`ops/formats.py`: the scale
    is 2^ceil(log2(max(amax, 1e-4) / 448)), codes round to nearest, ties to even).

    With a rope width, each head is first rotated by minus its angles and rounded, as `rope.rotate`
    with `inverse` does: attention outputs on their way into the first output product.

    Arguments:
        x_THD: [T, H, D] in the case's dtype; heads and columns dense, rows may lie apart.
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles; None without rope.

    Returns:
        codes_TI: uint8 [T, H D], e4m3.
        scales_TG: [T, H D / group], uint8 (e8m0) or fp32.
    """,
    cases={
        "deepseek-v4-flash": (
            QuantiseFp8Case(64, 512, rope_width=64),
            QuantiseFp8Case(1, 8192),
            QuantiseFp8Case(1, 2048),
        ),
        "deepseek-v4.1-flash": (
            QuantiseFp8Case(64, 512, group=32, rope_width=64),
            QuantiseFp8Case(1, 8192, group=32),
            QuantiseFp8Case(1, 2304, group=32),
        ),
        "deepseek-v3.2": (
            QuantiseFp8Case(128, 128, scale="fp32"),
            QuantiseFp8Case(1, 2048, scale="fp32"),
            QuantiseFp8Case(1, 18432, scale="fp32"),
        ),
        "glm-5.3": (
            QuantiseFp8Case(64, 256, scale="fp32"),
            QuantiseFp8Case(1, 2048, scale="fp32"),
            QuantiseFp8Case(1, 12288, scale="fp32"),
        ),
        "pebble": (QuantiseFp8Case(4, 512, rope_width=64), QuantiseFp8Case(1, 256)),
    },
    small_cases=(
        QuantiseFp8Case(3, 64, group=32, rope_width=16, dtype="float32"),
        QuantiseFp8Case(1, 96, group=32, scale="fp32"),
        QuantiseFp8Case(5, 128, rope_width=64),
        QuantiseFp8Case(1, 640),
    ),
    cost=_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

OPS = (FP8,)
