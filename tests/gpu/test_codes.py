"""Codes in kernels and kernels that encode, on this GPU, as its code or that of an older one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metainfer.kernels.triton.launch import JitLauncher, Launcher
from metainfer.kernels.triton.portable import PtxLauncher
from metainfer.ops.targets import parse_capability
from tests.fakes import code_checks, exact_checks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize(
    "check", (*code_checks.CHECKS, *exact_checks.CHECKS), ids=lambda check: check.__name__
)
def test_codes(check: Callable[[Launcher, str], None], request: pytest.FixtureRequest) -> None:
    code_for = request.config.getoption("as_target")
    check(PtxLauncher(parse_capability(code_for)) if code_for else JitLauncher(), "cuda")
