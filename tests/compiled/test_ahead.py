"""Code that is compiled beforehand is what the first launch of real arguments looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from metainfer.kernels.triton.ahead import Form, compile_ahead, missing_units
from metainfer.kernels.triton.record import CompileUnit, unit_of
from metainfer.kernels.triton.stand_ins import compile_as_jit, use_stand_in_driver
from tests.compiled.kernels import everything, product

H200 = (9, 0)
ALIGNED, APART = torch.empty(128), torch.empty(129)[1:]
ARGUMENTS = (
    (ALIGNED, APART, 16, 1, 16, 16, 1.0, True, 2, None),
    (ALIGNED.bfloat16(), ALIGNED.byte(), 1, 48, 7, 7, 3.5, False, 2.0, ALIGNED),
    (APART, ALIGNED, 2**40, 2**40, 2**40, 2**40, 1.0, True, 1.0, APART),
)


def unit(arguments: tuple[object, ...], size: int = 64) -> CompileUnit:
    return unit_of(everything, arguments, {"BLOCK": size, "num_warps": 2})[0]


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is on disk, for this process and its children."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def test_stand_ins_give_the_code_of_real_arguments(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    use_stand_in_driver(H200)
    for arguments in ARGUMENTS:
        real = everything.warmup(*arguments, grid=(1,), BLOCK=64, num_warps=2)
        everything.device_caches.clear()
        assert compile_as_jit(unit(arguments)).hash == real.hash
        everything.device_caches.clear()


def test_processes_leave_on_disk_what_they_compiled(at_home: Path) -> None:
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    # A tile of this size does not compile: nobody else pays for it.
    bad, _ = unit_of(product, (x, x, x.float(), 64), {"TYPE": None, "M": 7, "N": 16})
    units = [*(unit(arguments) for arguments in ARGUMENTS), unit(ARGUMENTS[0], 128), bad]
    assert missing_units(units, Form(H200)) == units
    told: list[tuple[int, int]] = []
    assert compile_ahead(units, Form(H200), 2, lambda *done: told.append(done)) == 4
    assert told == [(done, 5) for done in range(1, 6)]
    assert missing_units(units, Form(H200)) == [bad]
    assert missing_units(units, Form((8, 0))) == units


def test_no_process_is_started_for_a_few(at_home: Path) -> None:
    assert compile_ahead([unit(ARGUMENTS[0])], Form(H200), 2) == 0


def test_code_of_an_older_gpu_is_kept_for_its_launcher(at_home: Path) -> None:
    """What `PtxLauncher` asks Triton for is on disk then, apart from what runs natively."""
    units = [unit(arguments) for arguments in ARGUMENTS] + [unit(ARGUMENTS[0], 128)]
    form = Form((8, 9), portable=True)
    assert compile_ahead(units, form, 2) == 4
    assert missing_units(units, form) == []
    assert missing_units(units, Form((8, 9))) == units
    kept = sorted(path.name for path in (at_home / "triton").iterdir())
    for one in units:
        one.compile(form.capability)
    assert sorted(path.name for path in (at_home / "triton").iterdir()) == kept
