"""Codes of 8 and 4 bits in kernels, in the interpreter; tests/gpu does the same on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from metainfer.kernels.triton.launch import JitLauncher, Launcher
from tests.fakes.code_checks import CHECKS


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_codes(check: Callable[[Launcher, str], None], capability: tuple[int, int]) -> None:
    check(JitLauncher(capability, 4), "cpu")
