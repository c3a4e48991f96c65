"""The kernel of few rows compiles for every kind of card, keeps to registers, and multiplies as
each card does best."""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.kernels.gpu.program import CudaUnit
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.triton.launch import TARGETS
from metainfer.kernels.triton.machine_code import inspect
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.targets import CARD_KINDS

CODES, NUMBERS = "linear.fp8_rows", "linear.dense"
TAKEN = {(8, 0): "f16", (8, 6): "f16", (9, 0): "f16", (10, 0): "f16"}  # the others take e4m3


def units_of(op: str, case: Any, rows: int, capability: tuple[int, int]) -> tuple[Any, ...]:
    launch = RecordingLauncher(capability, 132)
    call = at_load(op, case, Load(rows, rows), Draw(0, "meta"))
    run(builtin_registry(launch), op, "cuda", case, call)
    return launch.units()


@pytest.mark.parametrize("capability", TARGETS, ids=str)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2"])
@pytest.mark.parametrize("op", [CODES, NUMBERS])
def test_code(op: str, model: str, rows: int, capability: tuple[int, int]) -> None:
    for case in OPS[op].cases[model][:1]:
        (unit,) = units_of(op, case, rows, capability)
        assert isinstance(unit, CudaUnit)
        code = inspect(unit.compile(capability))
        assert code.registers <= 128
        assert code.stack_bytes == 0, (unit, code)
        taken = "bf16" if op == NUMBERS else TAKEN.get(capability, "e4m3")
        assert code.matrix == (f"mma.sync {taken}",)


@pytest.mark.parametrize("kind", ["sm_80", "sm_90"])
def test_shapes_share_code(kind: str) -> None:
    """What differs between shapes are numbers that the code is given."""
    card = CARD_KINDS[kind]
    launch = RecordingLauncher(card.capability, card.multiprocessors)
    for case in OPS[CODES].cases["deepseek-v4-flash"]:
        for rows in (1, 5, 8, 12, 16):
            call = at_load(CODES, case, Load(rows, rows), Draw(0, "meta"))
            run(builtin_registry(launch), CODES, "cuda", case, call)
    assert len(launch.units()) <= 4  # blocks of 8 and of 16 warps, for up to 8 rows and up to 16


def test_more_rows_go_to_other_kernels() -> None:
    case = OPS[CODES].cases["deepseek-v4-flash"][0]
    for capability in ((8, 9), (9, 0)):
        for rows in (17, 300):
            units = units_of(CODES, case, rows, capability)
            assert not any(isinstance(unit, CudaUnit) for unit in units)
