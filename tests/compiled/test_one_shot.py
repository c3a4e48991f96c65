"""One-shot sums compile for every kind of card, with flags that order what peers see."""

from __future__ import annotations

import pytest
import torch

from metainfer.comm.one_shot_kernel import start_one_shot
from metainfer.kernels.triton.launch import TARGETS
from metainfer.kernels.triton.machine_code import inspect
from metainfer.kernels.triton.record import CompileUnit, RecordingLauncher


@pytest.mark.parametrize("capability", TARGETS, ids=str)
@pytest.mark.parametrize("push", [True, False])
def test_code_fits_and_orders_memory(capability: tuple[int, int], push: bool) -> None:
    launch = RecordingLauncher(capability, 132)
    partial = torch.empty(4 * 4096, dtype=torch.bfloat16, device="meta")
    areas = torch.empty(4, dtype=torch.int64, device="meta")
    start_one_shot(launch, partial, partial, areas, 1, 4, 2**18, push=push, longest=10**8)
    (unit,) = launch.units()
    assert isinstance(unit, CompileUnit)
    made = unit.compile(capability)
    assert inspect(made).stack_bytes == 0
    ptx = made.asm["ptx"]
    assert ptx.count("st.release.sys") == 3  # one for each peer
    assert ptx.count("ld.acquire.sys") == 6  # before the loop and in it
    before, behind = ptx.split("st.release.sys", 1)
    assert "bar.sync" in before.rsplit("st.global", 1)[1]  # all have written
    assert "bar.sync" in behind.rsplit("ld.acquire.sys", 1)[1].split("ld.volatile.global.v", 1)[0]
