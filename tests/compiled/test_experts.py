"""Experts and routing compile for every kind of card, fit it, and use its matrix instructions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from metainfer.kernels.compare import run
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import triton_backends
from metainfer.kernels.triton.launch import TARGETS, shared_limit
from metainfer.kernels.triton.machine_code import inspect
from metainfer.kernels.triton.record import CompileUnit, RecordingLauncher
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS

pytestmark = pytest.mark.timeout(800)

OP = "moe.experts_fp8_rows"
V4 = OPS[OP].cases["deepseek-v4-flash"][0]
MULTIPLIES = ("grouped_product", "route_logits")
SPILLED = 16  # bytes of a thread that nobody misses


def units_of(op: str, case: Any, rows: int, capability: tuple[int, int]) -> tuple[CompileUnit, ...]:
    launch = RecordingLauncher(capability, 132)
    call = at_load(op, case, Load(rows, rows), Draw(0, "meta"))
    run(Registry(triton_backends(launch)), op, "triton", case, call)
    return launch.units()


@pytest.mark.parametrize("capability", TARGETS, ids=str)
@pytest.mark.parametrize(
    ("op", "model", "rows"),
    [
        (OP, "deepseek-v4-flash", 64),
        (OP, "deepseek-v4-flash", 8192),
        (OP, "deepseek-v4.1-flash", 8192),
        (OP, "deepseek-v3.2", 1),
        ("moe.experts", "deepseek-v4-flash", 1024),
        ("moe.route_learned", "deepseek-v3.2", 8192),
    ],
)
def test_code_fits(op: str, model: str, rows: int, capability: tuple[int, int]) -> None:
    for unit in units_of(op, OPS[op].cases[model][0], rows, capability):
        code = inspect(unit.compile(capability))
        told = f"{unit.name} {unit.named_constants()}: {code}"
        assert code.shared_bytes <= shared_limit(capability), told
        assert code.stack_bytes <= SPILLED, told
        if unit.name in MULTIPLIES:
            assert code.matrix and "emulated" not in code.matrix, told


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
def test_four_bytes_that_are_unpacked_together_follow_each_other(
    capability: tuple[int, int],
) -> None:
    """One table serves them: they must be columns of one group, so lie in one thread, in order."""
    for rows in (1, 8192):
        for unit in units_of(OP, V4, rows, capability):
            code = unit.compile(capability).asm["ttgir"]
            layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<(\{.*?\})>", code))
            unpacked = re.findall(r"tt\.elementwise_inline_asm .*->.*?(#\w+)>", code)
            assert unpacked or unit.name != "grouped_product"
            for layout in unpacked:
                each = re.search(r"sizePerThread = \[1, 1, (\d+)\].*order = \[2,", layouts[layout])
                assert each and int(each[1]) >= 4, layouts[layout]
