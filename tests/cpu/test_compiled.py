"""Runs tests/compiled in a process where kernels are compiled, not interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.command import metainfer

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_code_for_gpus() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compiled"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0


def test_nothing_is_covered_where_kernels_are_interpreted() -> None:
    ran = metainfer("kernels", "coverage", "pebble", "--target", "sm_89", "--part", "attention")
    assert (ran.code, ran.out) == (2, "")
    assert "kernels are interpreted in this process" in ran.err
    assert "hint: start it without TRITON_INTERPRET" in ran.err
