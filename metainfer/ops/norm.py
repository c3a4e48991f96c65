"""Contract of the RMS norm."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance


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


def _cost(case: RmsNormCase, load: Load) -> Cost:
    elements = load.rows * case.width
    return Cost(flops=4 * elements, bytes=2 * elements * ELEMENT_BYTES[case.dtype])


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
        "pebble": (RmsNormCase(256), RmsNormCase(128)),
    },
    small_cases=(RmsNormCase(40, dtype="float32"), RmsNormCase(128, eps=1e-5)),
    cost=_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

OPS = (RMS_NORM,)
