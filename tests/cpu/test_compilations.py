"""Kernels that are compiled while requests are served are counted and named, each once."""

from __future__ import annotations

import types

import pytest

from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.triton.launch import JitLauncher


class Kernel:
    """Compiles once for each value of N, as Triton does for constants."""

    __name__ = "scores"

    def __init__(self) -> None:
        self.compiled: dict[int, object] = {}

    def __getitem__(self, grid):
        return lambda *arguments, N, **options: self.compiled.setdefault(
            N, types.SimpleNamespace(n=N)
        )


def test_first_starts_count(caplog: pytest.LogCaptureFixture) -> None:
    compilations, kernel = Compilations(), Kernel()
    launch = JitLauncher((9, 0), 4, compilations)
    launch(kernel, (1,), N=1)
    launch(kernel, (0,), N=2)
    launch(kernel, (3,), N=1)
    assert (compilations.in_warm_up, compilations.in_service) == (1, 0)
    compilations.begin_service()
    launch(kernel, (3,), N=1)
    assert not caplog.records
    for _ in range(2):
        launch(kernel, (1,), N=2)
    assert (compilations.in_warm_up, compilations.in_service) == (1, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "scores was compiled while requests were served" in caplog.text
