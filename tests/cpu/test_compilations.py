"""Kernels that are compiled while requests are served are counted and named, each once."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from metainfer.kernels.gpu.code_cache import code_of, is_kept
from metainfer.kernels.gpu.compilations import Compilations, news
from metainfer.kernels.gpu.program import CudaKernel, CudaUnit, unit_of
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
    said = "scores was compiled while requests were served: N is 2 (the nearest: is 1)"
    assert said in caplog.text


def test_news_are_told_beside_the_nearest() -> None:
    known = [{"x": "is a *bf16", "N": "is 1"}, {"x": "is a *bf16, 16 divides it", "N": "is 2"}]
    facts = {"x": "is a *bf16", "N": "is 3"}
    assert news(facts, known) == "N is 3 (the nearest: is 1)"
    assert news(facts, []) == "it had not been started before"
    assert news(facts, [facts]) == "its code was not in memory any more"
    many = {f"C{n}": f"is {n}" for n in range(9)}
    assert news(many, [{}]).endswith("C5 is 5 (the nearest: is not there) and 3 more")


def test_units_tell_what_makes_them_different(tmp_path: Path) -> None:
    kernel = CudaKernel("scores", 128, tmp_path)
    one, other = (unit_of(kernel, 1024, {"BM": size}) for size in (16, 32))
    assert news(one.facts(), [other.facts()]) == "BM is 16 (the nearest: is 32)"


def test_code_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scores.cu").write_text("void scores() {}")
    compiled = []

    def compile_(self: CudaUnit, capability: tuple[int, int]) -> object:
        compiled.append(capability)
        return types.SimpleNamespace(asm={"cubin": b"code", "ptx": "text"})

    monkeypatch.setattr(CudaUnit, "compile", compile_)
    unit, folder = unit_of(CudaKernel("scores", 128, tmp_path), 0, {"BM": 16}), tmp_path / "kept"
    assert not is_kept(unit, (9, 0), folder)
    for _ in range(2):
        assert code_of(unit, (9, 0), "cubin", folder) == b"code"
        assert code_of(unit, (9, 0), "ptx", folder) == "text"
    assert len(compiled) == 2 and is_kept(unit, (9, 0), folder)
    (tmp_path / "scores.cu").write_text("void scores() { }")
    assert not is_kept(unit, (9, 0), folder)
    folder.chmod(0o777)
    for _ in range(2):
        assert code_of(unit, (9, 0), "cubin", folder) == b"code"
    assert len(compiled) == 4
