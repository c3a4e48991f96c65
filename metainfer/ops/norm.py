"""Contracts of the RMS norm: alone, after an addition, and with its result as fp8 groups."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance
from metainfer.ops.formats import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class RmsNormCase:
    """Attributes:
    width: D.
    eps: added to the mean square.
    dtype: format of the result, "float32" or "bfloat16".
    """

    width: int
    eps: float = 1e-6
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class AddRmsNormCase:
    """Attributes:
    width: D.
    eps: added to the mean square.
    dtype: format of all rows.
    """

    width: int
    eps: float = 1e-6
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class RmsNormFp8Case:
    """Attributes:
    width: D, a multiple of the group.
    eps: added to the mean square.
    group: channels per scale, 32 or 128.
    scale: "e8m0", a byte each, or "fp32"; powers of two in both.
    adds: whether a residual is added first.
    normed: whether the rows that were quantised are returned too.
    dtype: format of all rows, and of the norm's result before it is quantised.
    """

    width: int
    eps: float = 1e-6
    group: int = 128
    scale: str = "e8m0"
    adds: bool = False
    normed: bool = False
    dtype: str = "bfloat16"


def _cost(case: RmsNormCase, load: Load) -> Cost:
    elements = load.rows * case.width
    return Cost(flops=4 * elements, bytes=2 * elements * ELEMENT_BYTES[case.dtype])


def _add_cost(case: AddRmsNormCase, load: Load) -> Cost:
    elements = load.rows * case.width
    return Cost(flops=5 * elements, bytes=4 * elements * ELEMENT_BYTES[case.dtype])


def _fp8_cost(case: RmsNormFp8Case, load: Load) -> Cost:
    elements = load.rows * case.width
    rows = (1 + 2 * case.adds + case.normed) * ELEMENT_BYTES[case.dtype]
    codes = 1 + SCALE_BYTES[case.scale] / case.group
    return Cost(flops=(6 + case.adds) * elements, bytes=elements * (rows + codes))


RMS_NORM = Op(
    name="norm.rms_norm",
    doc="""Divides each row by its root mean square and multiplies it by a weight.

    y = x / sqrt(mean(x^2) + eps) * weight, computed in fp32, rounded once at the end.

    Arguments:
        x_TD: fp32 or bf16 [T, D]; rows may lie apart (any row stride), columns may not.
        weight_D: fp32 [D].

    Returns:
        y_TD: new, in the case's dtype, dense.
    """,
    cases={
        "deepseek-v4-flash": (RmsNormCase(4096), RmsNormCase(1024)),
        "deepseek-v4.1-flash": tuple(RmsNormCase(width, 1e-20) for width in (5120, 1280, 512)),
        "deepseek-v3.2": (RmsNormCase(7168), RmsNormCase(1536)),
        "glm-5.3": (RmsNormCase(6144, 1e-5), RmsNormCase(2048, 1e-5)),
        "pebble": (RmsNormCase(256), RmsNormCase(128)),
    },
    small_cases=(RmsNormCase(40, dtype="float32"), RmsNormCase(128, eps=1e-5)),
    cost=_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

ADD_RMS_NORM = Op(
    name="norm.add_rms_norm",
    doc="""Adds the output of a layer to the residual stream and norms the sum.

    sum = residual + x, rounded; y = `norm.rms_norm` of the rounded sum.

    Arguments:
        x_TD: [T, D] in the case's dtype; rows may lie apart.
        residual_TD: [T, D] in the case's dtype; rows may lie apart.
        weight_D: fp32 [D].

    Returns:
        sum_TD, y_TD: new, in the case's dtype, dense.
    """,
    cases={
        "deepseek-v3.2": (AddRmsNormCase(7168),),
        "glm-5.3": (AddRmsNormCase(6144, 1e-5),),
    },
    small_cases=(AddRmsNormCase(40, dtype="float32"), AddRmsNormCase(128, eps=1e-5)),
    cost=_add_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

RMS_NORM_FP8 = Op(
    name="norm.rms_norm_fp8",
    doc="""`norm.rms_norm` (of `norm.add_rms_norm`'s sum where the case adds), rounded to the
    case's dtype, then `quantise.fp8`: what a product in fp8 reads.

    Arguments:
        x_TD: [T, D] in the case's dtype; rows may lie apart.
        residual_TD: the same, or None where the case does not add.
        weight_D: fp32 [D].

    Returns:
        codes_TD: uint8, e4m3.
        scales_TG: [T, D / group], uint8 (e8m0) or fp32.
        y_TD: the normed rows in the case's dtype, where the case returns them.
        sum_TD: where the case adds.
    """,
    cases={
        "deepseek-v4-flash": (RmsNormFp8Case(4096, normed=True), RmsNormFp8Case(1024)),
        "deepseek-v4.1-flash": (
            RmsNormFp8Case(5120, 1e-20, group=32, normed=True),
            RmsNormFp8Case(1280, 1e-20, group=32),
        ),
        "deepseek-v3.2": (
            RmsNormFp8Case(7168, scale="fp32", adds=True, normed=True),
            RmsNormFp8Case(1536, scale="fp32"),
        ),
        "glm-5.3": (
            RmsNormFp8Case(6144, 1e-5, scale="fp32", adds=True, normed=True),
            RmsNormFp8Case(2048, 1e-5, scale="fp32"),
        ),
        "pebble": (RmsNormFp8Case(256, normed=True), RmsNormFp8Case(128)),
    },
    small_cases=(
        RmsNormFp8Case(96, group=32, normed=True, dtype="float32"),
        RmsNormFp8Case(128, scale="fp32", adds=True),
        RmsNormFp8Case(384, 1e-20, adds=True, normed=True),
    ),
    cost=_fp8_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

OPS = (RMS_NORM, ADD_RMS_NORM, RMS_NORM_FP8)
