"""Tests of code for GPUs, compiled where there is none. They need a process that was started
without TRITON_INTERPRET; tests/cpu/test_compiled.py runs them in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if triton.knobs.runtime.interpret:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="kernels are interpreted here"))
