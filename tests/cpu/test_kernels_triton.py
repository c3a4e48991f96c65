"""Every Triton backend in the interpreter against the reference, at every small case and variant of
inputs, as code for a GPU with e4m3 and for one without; tests/gpu does the same on a GPU.

The interpreter takes a twentieth of a second for one program of attention over keys of 512
channels: such cases run with few rows here.
"""

from __future__ import annotations

import pytest

from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import DECLARED, triton_backends
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS

CAPABILITIES = ((8, 0), (9, 0))
REGISTRIES = {
    capability: Registry((*triton_backends(JitLauncher(capability, 4)), *REFERENCE_BACKENDS))
    for capability in CAPABILITIES
}
WIDE = 512
FEW_ROWS = (
    *("0 rows", "1 rows", "5 rows", "short halo", "long halo", "fp32 entries"),  # prefill
    *("3 rows", "one full row", "no columns", "fp32 caches"),  # decode
)


def is_wide(op: str, case: object) -> bool:
    return op.startswith("attention.sparse") and getattr(case, "width", 0) >= WIDE


ROUNDS = [
    pytest.param(declared.op, declared.name, case, capability, id=f"{declared.op}-{n}-{capability}")
    for declared in DECLARED
    for n, case in enumerate(OPS[declared.op].small_cases)
    for capability in CAPABILITIES
]


@pytest.mark.parametrize(("op", "backend", "case", "capability"), ROUNDS)
def test_backend_fulfils_the_contract(
    op: str, backend: str, case: object, capability: tuple[int, int]
) -> None:
    registry = REGISTRIES[capability]
    verdict = registry.backends(op)[backend].eligible(case, Target("cuda", capability))
    if not verdict:
        pytest.skip(verdict.reason)
    for variant in VARIANTS[op]:
        if is_wide(op, case) and variant not in FEW_ROWS:
            continue
        try:
            check(registry, op, backend, case, variant)
        except Exception as error:
            error.add_note(f"{op} on {backend}, {variant}: {case}")
            raise
