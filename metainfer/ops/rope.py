"""Contracts of the rotary embedding, alone and fused with the norm of each head."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance


@dataclass(frozen=True, slots=True)
class RotateCase:
    """Attributes:
    heads, width: H and D.
    rope_width: how many of the last channels of each head are rotated; even.
    inverse: rotate by minus the angle.
    dtype: format of x, "float32" or "bfloat16".
    """

    heads: int
    width: int
    rope_width: int
    inverse: bool = False
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class NormRotateCase:
    """Attributes:
    heads, width: H and D.
    rope_width: how many of the last channels of each head are rotated; even.
    weighted: whether the norm has a weight.
    eps: added to the mean square.
    dtype: format of x and of the result.
    """

    heads: int
    width: int
    rope_width: int
    weighted: bool
    eps: float = 1e-6
    dtype: str = "bfloat16"


def _rotate_cost(case: RotateCase, load: Load) -> Cost:
    elements = load.rows * case.heads * case.rope_width
    return Cost(flops=3 * elements, bytes=2 * elements * ELEMENT_BYTES[case.dtype])


def _norm_rotate_cost(case: NormRotateCase, load: Load) -> Cost:
    elements = load.rows * case.heads * case.width
    return Cost(flops=4 * elements, bytes=2 * elements * ELEMENT_BYTES[case.dtype])


ROTATE = Op(
    name="rope.rotate",
    doc="""Rotary embedding on the last channels of each head, interleaved pairs.

    Channels (2k, 2k + 1) of the last R channels are one complex number, multiplied by
    cos + i sin of the row's k-th angle (of minus the angle when `inverse`), in fp32. The other
    channels stay. The inverse undoes, on attention outputs, the rotation that values carry because
    keys and values are one vector.

    Arguments:
        x_THD: [T, H, D] in the case's dtype; heads and columns dense, rows may lie apart.
            Overwritten.
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles.

    Returns:
        x_THD itself, rotated.
    """,
    cases={
        "deepseek-v4-flash": (
            RotateCase(64, 512, 64, inverse=True),
            RotateCase(64, 128, 64),
        ),
        "pebble": (RotateCase(4, 512, 64, inverse=True), RotateCase(64, 128, 64)),
    },
    small_cases=(
        RotateCase(3, 20, 8, dtype="float32"),
        RotateCase(2, 64, 64, inverse=True, dtype="float32"),
        RotateCase(2, 128, 64, inverse=True),
    ),
    cost=_rotate_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

NORM_ROTATE = Op(
    name="rope.norm_rotate",
    doc="""RMS norm of each head (`norm.rms_norm`, the weight optional), then `rope.rotate`.

    Used for queries (each head by itself, no weight) and for the latent, which is key and value
    of all heads (one head, with a weight).

    Arguments:
        x_THD: [T, H, D] in the case's dtype; heads and columns dense, rows may lie apart. May be
            overwritten.
        weight_D: fp32 [D], or None when the case is not weighted.
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles.

    Returns:
        y_THD in the case's dtype; may share the memory of x.
    """,
    cases={
        "deepseek-v4-flash": (
            NormRotateCase(64, 512, 64, weighted=False),
            NormRotateCase(1, 512, 64, weighted=True),
        ),
        "pebble": (
            NormRotateCase(4, 512, 64, weighted=False),
            NormRotateCase(1, 512, 64, weighted=True),
        ),
    },
    small_cases=(
        NormRotateCase(3, 20, 8, weighted=False, dtype="float32"),
        NormRotateCase(1, 32, 8, weighted=True, dtype="float32"),
        NormRotateCase(2, 128, 64, weighted=False),
        NormRotateCase(1, 128, 64, weighted=True),
    ),
    cost=_norm_rotate_cost,
    tolerance=Tolerance(bfloat16=1.5e-2),
)

OPS = (ROTATE, NORM_ROTATE)
