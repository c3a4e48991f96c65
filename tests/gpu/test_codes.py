"""Codes of 8 and 4 bits in kernels, on this GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metainfer.kernels.triton.launch import JitLauncher, Launcher
from tests.fakes.code_checks import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_codes(check: Callable[[Launcher, str], None]) -> None:
    check(JitLauncher(), "cuda")
