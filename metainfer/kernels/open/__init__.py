"""Open kernels of other projects in place of ours: backends named "open", one file per project.

They run only where a kernel order names them: they are what the setting *open* of `bench stages`
measures ours against. Where the project is not installed, or has no kernel for a case, they say so.
Products that cuBLAS has are not here: `torch_products` binds those by default. Nor are torch's
grouped products, which take experts in bf16, four times their memory: `composed` has them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from metainfer.kernels.open import flashmla
from metainfer.kernels.registry import Backend

BACKENDS: tuple[Backend, ...] = flashmla.BACKENDS

PROJECTS: Mapping[str, str] = MappingProxyType(
    {backend.op: flashmla.PROJECT for backend in flashmla.BACKENDS}
)
"""Whose kernel runs an op, by op."""
