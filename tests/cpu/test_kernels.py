"""Every backend that runs on a CPU against the reference, at every small case and variant of
inputs; tests/gpu does the same on a GPU."""

from __future__ import annotations

import pytest

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS, make

CPU = Target("cpu")
REGISTRY = builtin_registry()
ROUNDS = [
    pytest.param(op, backend, case, id=f"{op}-{backend}-{number}")
    for op in OPS
    for backend in REGISTRY.backends(op)
    for number, case in enumerate(OPS[op].small_cases)
    if backend != REFERENCE
]


@pytest.mark.parametrize(("op", "backend", "case"), ROUNDS)
def test_backend_fulfils_the_contract(op: str, backend: str, case: object) -> None:
    verdict = REGISTRY.backends(op)[backend].eligible(case, CPU)
    if not verdict:
        pytest.skip(verdict.reason)
    for variant in VARIANTS[op]:
        try:
            check(REGISTRY, op, backend, case, variant)
        except Exception as error:
            error.add_note(f"{op} on {backend}, {variant}: {case}")
            raise


@pytest.mark.parametrize("op", OPS)
def test_reference_serves_every_variant(op: str) -> None:
    for case in OPS[op].small_cases:
        for variant in VARIANTS[op]:
            for result in run(REGISTRY, op, REFERENCE, case, make(op, case, variant)):
                assert not result.isnan().any(), f"{op}, {variant}: {case}"


def test_every_op_has_a_reference_and_inputs() -> None:
    assert set(VARIANTS) == set(OPS)
    assert all(REFERENCE in REGISTRY.backends(op) for op in OPS)
