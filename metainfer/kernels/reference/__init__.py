"""Plain implementations: the formula of each op in torch, for any device, meant to be read."""

from metainfer.kernels.reference import attention, compress, hc, index, linear, moe, norm, rope
from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = tuple(
    backend
    for module in (norm, rope, linear, hc, compress, index, attention, moe)
    for backend in module.BACKENDS
)
