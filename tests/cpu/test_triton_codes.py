"""Codes in kernels and kernels that encode, in the interpreter; tests/gpu does so on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from metainfer.kernels.triton.launch import JitLauncher, Launcher
from tests.fakes import code_checks, exact_checks

# One multiprocessor is given much work a program: the interpreter takes its time for each.
ROUNDS = [
    pytest.param(check, capability, id=f"{check.__name__}-{capability}")
    for check in (*code_checks.CHECKS, *exact_checks.CHECKS)
    for capability in ((8, 0), (9, 0))[check in exact_checks.CHECKS :]
]


@pytest.mark.parametrize(("check", "capability"), ROUNDS)
def test_codes(check: Callable[[Launcher, str], None], capability: tuple[int, int]) -> None:
    check(JitLauncher(capability, 1), "cpu")
