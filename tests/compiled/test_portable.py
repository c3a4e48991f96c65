"""Code of older GPUs from its PTX, up to the driver's calls; tests/gpu runs it."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metainfer.core.errors import MetainferError
from metainfer.kernels.gpu import run
from metainfer.kernels.gpu.driver import PARAMETER_BYTES, Driver
from metainfer.kernels.triton.portable import PtxLauncher, load, packed
from metainfer.kernels.triton.record import CompileUnit, unit_of
from tests.compiled.kernels import everything, product


class NotedDriver:
    """Notes what would be loaded."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []
        self.shared: list[tuple[int, int]] = []

    def load(self, ptx: str, name: str) -> int:
        self.loaded.append((ptx, name))
        return len(self.loaded)

    def allow_shared(self, function: int, shared_bytes: int) -> None:
        self.shared.append((function, shared_bytes))


def unit(m: int, stages: int = 3) -> CompileUnit:
    a = torch.empty(m, 256, dtype=torch.bfloat16, device="meta")
    options = {"TYPE": None, "M": m, "N": 128, "num_warps": 8, "num_stages": stages}
    return unit_of(product, (a, a, a.float(), 256), options)[0]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_the_ptx_is_that_of_the_older_gpu(capability: tuple[int, int]) -> None:
    driver: Any = NotedDriver()
    found = load(driver, unit(128), capability)
    ((ptx, name),) = driver.loaded
    assert f".target sm_{capability[0]}{capability[1]}\n" in ptx
    assert "mma.sync" in ptx
    assert f".entry {name}(" in ptx
    assert driver.shared == [(1, found.shared_bytes)]
    assert found.shared_bytes > 48 * 1024
    assert found.threads == 256


def test_arguments_are_packed_as_the_ptx_lists_them() -> None:
    x = torch.zeros(128)
    arguments = (x, x, 5, 2, 3, 2**40, 1.5, True, 0.25, None)
    made, runtime = unit_of(everything, arguments, {"BLOCK": 64, "num_warps": 1})
    driver: Any = NotedDriver()
    found = load(driver, made, (8, 0))
    written = packed(found.form, runtime)
    values = [written[at : at + PARAMETER_BYTES] for at in range(0, len(written), PARAMETER_BYTES)]
    forms = zip("QQiiiqfBf", values, strict=False)
    assert [struct.unpack_from(f"<{form}", value)[0] for form, value in forms] == [
        x.data_ptr(), x.data_ptr(), 5, 2, 3, 2**40, 1.5, 1, 0.25
    ]  # fmt: skip
    nulls = values[9:]
    assert nulls
    assert not any(map(any, nulls))
    assert len(values) == driver.loaded[0][0].split(")")[0].count(".param")


def test_arguments_of_cuda_are_packed_by_their_types() -> None:
    x = torch.zeros(4)
    written = run.packed((x, None, -3, 2**40, 0.5, True))
    assert struct.unpack("<QQqqf4xq", written) == (x.data_ptr(), 0, -3, 2**40, 0.5, 1)


def test_the_driver_is_told_where_each_number_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the call of the library, in whose place the numbers are read."""
    read: list[int] = []

    def launch(function: Any, *rest: Any) -> int:
        read.extend(ctypes.c_uint64.from_address(place).value for place in rest[-2])
        return 0

    made = Driver.__new__(Driver)
    monkeypatch.setattr(made, "_cuda", SimpleNamespace(cuLaunchKernel=launch), raising=False)
    made.launch(1, (1, 1, 1), 32, 0, 0, struct.pack("<QqQ", 2**63, 7, 0))
    assert read == [2**63, 7, 0]


def test_what_the_older_gpu_cannot_do_is_refused() -> None:
    driver: Any = NotedDriver()
    with pytest.raises(MetainferError, match="bytes of shared memory and sm_89 has 101376"):
        load(driver, unit(256, stages=6), (8, 9))
    assert driver.loaded == []
    with pytest.raises(MetainferError, match="no code for sm_90 runs on other GPUs"):
        PtxLauncher((9, 0), 132, driver)
