"""Operations that are elementwise, or a plain formula over fp32: there the reference, which is
written in torch's own operations, is what a framework runs. Rows in fp8 are for kernels alone."""

from __future__ import annotations

from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import COMPOSED

_FORMULAS = (
    "norm.", "rope.", "hc.", "attention.compress", "moe.route", "moe.swiglu", "sample.", "step.",
)  # fmt: skip


BACKENDS: tuple[Backend, ...] = tuple(
    Backend(reference.op, COMPOSED, reference.run, reference.eligible, reference.prepare)
    for reference in REFERENCES
    if reference.op.startswith(_FORMULAS) and "fp8" not in reference.op
)
