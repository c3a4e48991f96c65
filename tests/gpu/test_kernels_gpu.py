"""Every backend that runs on this GPU, references too, against the reference on the CPU, at every
small case and variant of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.platform import Platform, platform
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes import one_case
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
        numbers = one_of_each if metafunc.config.getoption("one_case") else every_number
        rounds = [
            pytest.param(op, backend, OPS[op].small_cases[number], id=f"{op}-{backend}-{number}")
            for op in OPS
            for backend in registry.backends(op)
            if not (code_for and backend == REFERENCE)
            for number in numbers(op, backend, code_for)
        ]
    metafunc.parametrize(("op", "backend", "case"), rounds)


def every_number(op: str, backend: str, code_for: str | None) -> Sequence[int]:
    return range(len(OPS[op].small_cases))


def one_of_each(op: str, backend: str, code_for: str | None) -> Sequence[int]:
    """Cases that start all kernels of the backend; of what is not ours, or refuses, the last."""
    launch, registry = on_paper(code_for)
    found: list[int] = []
    if backend in registry.backends(op):
        found = one_case.one_of_each(registry, launch, op, backend, here(code_for).target)
    return found or every_number(op, backend, code_for)[-1:]


@cache
def on_paper(code_for: str | None) -> tuple[RecordingLauncher, Registry]:
    """What notes the kernels that the code here, or that for another GPU, would start."""
    capability = here(code_for).target.capability
    assert capability is not None
    count = torch.cuda.get_device_properties().multi_processor_count
    launch = RecordingLauncher(capability, count, portable=code_for is not None)
    return launch, builtin_registry(launch)


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
