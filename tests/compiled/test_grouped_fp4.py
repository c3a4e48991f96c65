"""The grouped products of sm_90 compile, keep to registers, and use the right instructions."""

from __future__ import annotations

import pytest

from metainfer.kernels.cuda import grouped_fp4
from metainfer.kernels.gpu.program import CudaUnit
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.triton.launch import shared_limit
from metainfer.kernels.triton.machine_code import inspect
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS

OP = "moe.experts_fp8_rows"
SM_90 = (9, 0)


@pytest.mark.parametrize("rows", [1, 512, 2048, 8192])
def test_code(rows: int) -> None:
    case = OPS[OP].cases["deepseek-v4-flash"][0]
    launch = RecordingLauncher(SM_90, 132)
    call = at_load(OP, case, Load(rows, rows), Draw(0, "meta"))
    weights = grouped_fp4.prepare(case, *call.weights)
    y = grouped_fp4.experts_fp8_rows(launch, case, weights, *call.arguments)
    assert y.shape == (rows, case.width)
    units = [unit for unit in launch.units() if isinstance(unit, CudaUnit)]
    assert len(units) == 2
    for unit in units:
        code = inspect(unit.compile(SM_90))
        assert code.stack_bytes == 0, (unit, code)
        assert code.matrix == ("wgmma e4m3",)
        assert unit.shared_bytes <= shared_limit(SM_90)
