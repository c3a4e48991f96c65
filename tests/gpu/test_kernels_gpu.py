"""Every backend that runs on this GPU, references too, against the reference on the CPU, at every
small case and variant of inputs."""

from __future__ import annotations

import pytest
import torch

from metainfer.kernels.builtin import builtin_registry
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

REGISTRY = builtin_registry()
ROUNDS = [
    pytest.param(op, backend, case, id=f"{op}-{backend}-{number}")
    for op in OPS
    for backend in REGISTRY.backends(op)
    for number, case in enumerate(OPS[op].small_cases)
]


@pytest.mark.parametrize(("op", "backend", "case"), ROUNDS)
def test_backend_fulfils_the_contract(op: str, backend: str, case: object) -> None:
    target = Target("cuda", torch.cuda.get_device_capability())
    verdict = REGISTRY.backends(op)[backend].eligible(case, target)
    if not verdict:
        pytest.skip(verdict.reason)
    for variant in VARIANTS[op]:
        try:
            check(REGISTRY, op, backend, case, variant, "cuda")
        except Exception as error:
            error.add_note(f"{op} on {backend}, {variant}: {case}")
            raise
