"""Every backend that runs on this GPU, references too, against the reference on the CPU, at every
small case and variant of inputs."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from metainfer.kernels.platform import Platform, platform
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
FEW_VARIANTS = 3


@cache
def here(code_for: str | None) -> Platform:
    return platform("cuda", code_for)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rounds = []
    if torch.cuda.is_available():
        code_for = metafunc.config.getoption("as_target")
        registry = here(code_for).registry
        first = -1 if metafunc.config.getoption("one_case") else 0
        rounds = [
            pytest.param(op, backend, case, id=f"{op}-{backend}-{number}")
            for op in OPS
            for backend in registry.backends(op)
            if not (code_for and backend == REFERENCE)
            for number, case in list(enumerate(OPS[op].small_cases))[first:]
        ]
    metafunc.parametrize(("op", "backend", "case"), rounds)


def test_backend_fulfils_the_contract(
    op: str, backend: str, case: object, request: pytest.FixtureRequest
) -> None:
    on = here(request.config.getoption("as_target"))
    verdict = on.registry.backends(op)[backend].eligible(case, on.target)
    if not verdict:
        pytest.skip(verdict.reason)
    variants = list(VARIANTS[op])
    if request.config.getoption("one_case"):
        variants = variants[-FEW_VARIANTS:]
    for variant in variants:
        try:
            check(on.registry, op, backend, case, variant, "cuda")
        except Exception as error:
            error.add_note(f"{op} on {backend}, {variant}: {case}")
            raise
