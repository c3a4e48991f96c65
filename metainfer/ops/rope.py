"""Contracts of the rotary embedding, alone and fused with the norm of each head or key."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance


@dataclass(frozen=True, slots=True)
class RotateCase:
    """Attributes:
    heads, width: H and D.
    rope_width: R, how many channels of each head are rotated; even.
    inverse: rotate by minus the angle.
    dtype: format of x, "float32" or "bfloat16".
    interleaved: a pair is two channels side by side; otherwise one of the first R / 2 and one of
        the last R / 2 that are rotated.
    leading: the first channels of a head are rotated, not the last.
    """

    heads: int
    width: int
    rope_width: int
    inverse: bool = False
    dtype: str = "bfloat16"
    interleaved: bool = True
    leading: bool = False


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


@dataclass(frozen=True, slots=True)
class LayerNormRotateCase:
    """Attributes:
    width: D.
    rope_width: R, how many channels are rotated; even.
    interleaved, leading: as those of `RotateCase`.
    eps: added to the variance.
    dtype: format of x and of the result.
    """

    width: int
    rope_width: int
    interleaved: bool = True
    leading: bool = False
    eps: float = 1e-6
    dtype: str = "bfloat16"


def _rotate_cost(case: RotateCase, load: Load) -> Cost:
    elements = load.rows * case.heads * case.rope_width
    moved = 2 * elements * ELEMENT_BYTES[case.dtype] + 4 * load.rows * case.rope_width
    return Cost(flops=3 * elements, bytes=moved)


def _norm_rotate_cost(case: NormRotateCase, load: Load) -> Cost:
    elements = load.rows * case.heads * case.width
    moved = 2 * elements * ELEMENT_BYTES[case.dtype] + 4 * load.rows * case.rope_width
    return Cost(flops=4 * elements, bytes=moved)


def _layer_norm_rotate_cost(case: LayerNormRotateCase, load: Load) -> Cost:
    elements = load.rows * case.width
    moved = 2 * elements * ELEMENT_BYTES[case.dtype] + 4 * load.rows * case.rope_width
    return Cost(flops=6 * elements, bytes=moved)


ROTATE = Op(
    name="rope.rotate",
    doc="""Rotary embedding on the last R channels of each head, or on the first.

    Channels (2k, 2k + 1) of the R channels, or (k, k + R / 2) where they are not interleaved, are
    one complex number, multiplied by cos + i sin of the row's k-th angle (of minus the angle when
    `inverse`), in fp32. The other channels stay. The inverse undoes, on attention outputs, the
    rotation that values carry because keys and values are one vector.

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
        "deepseek-v4.1-flash": (
            RotateCase(64, 512, 64),
            RotateCase(64, 512, 64, inverse=True),
            RotateCase(32, 128, 64),
        ),
        "deepseek-v3.2": (
            RotateCase(128, 192, 64),
            RotateCase(64, 128, 64, interleaved=False, leading=True),
        ),
        "glm-5.3": (RotateCase(64, 256, 64), RotateCase(32, 128, 64, leading=True)),
        "pebble": (RotateCase(4, 512, 64, inverse=True), RotateCase(64, 128, 64)),
    },
    small_cases=(
        RotateCase(3, 20, 8, dtype="float32"),
        RotateCase(2, 64, 64, inverse=True, dtype="float32"),
        RotateCase(2, 128, 64, inverse=True),
        RotateCase(3, 24, 8, dtype="float32", interleaved=False),
        RotateCase(2, 40, 16, inverse=True, dtype="float32", leading=True),
        RotateCase(5, 128, 64, interleaved=False, leading=True),
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
        "deepseek-v4.1-flash": (NormRotateCase(1, 512, 64, weighted=True, eps=1e-20),),
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

LAYER_NORM_ROTATE = Op(
    name="norm.layer_norm_rotate",
    doc="""Layer norm of each row with weight and bias, then the rotary embedding: index keys.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias in fp32, rounded to the
    case's dtype, then rotated as by `rope.rotate` and rounded again.

    Arguments:
        x_TD: [T, D] in the case's dtype; rows may lie apart.
        weight_D, bias_D: fp32 [D].
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles.

    Returns:
        y_TD: new, in the case's dtype, dense.
    """,
    cases={
        "deepseek-v3.2": (LayerNormRotateCase(128, 64, interleaved=False, leading=True),),
        "glm-5.3": (LayerNormRotateCase(128, 64, leading=True),),
    },
    small_cases=(
        LayerNormRotateCase(40, 8, dtype="float32"),
        LayerNormRotateCase(64, 32, interleaved=False, leading=True, dtype="float32"),
        LayerNormRotateCase(128, 64, interleaved=False, leading=True),
        LayerNormRotateCase(128, 64, leading=True),
    ),
    cost=_layer_norm_rotate_cost,
    tolerance=Tolerance(bfloat16=1.5e-2),
)

OPS = (ROTATE, NORM_ROTATE, LAYER_NORM_ROTATE)
