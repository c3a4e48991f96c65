"""Operations as an eager framework composes them of torch's own: the generic path.

Weights are unpacked to the compute dtype when they are loaded, products and attention are torch's
products over gathered rows, and nothing is fused. These run only where a kernel order names them:
they are what `bench stages` and `bench ops` measure the kernels against.
"""

from metainfer.kernels.composed import attention, formulas, index, linear, moe
from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = tuple(
    backend for module in (formulas, linear, attention, index, moe) for backend in module.BACKENDS
)
