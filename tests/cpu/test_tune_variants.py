"""Variants that tuning may choose: the same function, other tiles."""

from __future__ import annotations

import pytest

from metainfer.kernels.cuda.few_rows import _cycles, arrangement
from metainfer.kernels.platform import Platform
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import moe, route
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.moe_tiles import height_of
from metainfer.kernels.tune import Bench, Work
from metainfer.ops.base import Load, Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.moe import RouteCase
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS


@pytest.mark.parametrize("rows", [3, 40])
def test_variants_of_experts_in_triton_are_what_the_reference_is(rows: int) -> None:
    launch = JitLauncher((9, 0), 132)
    declared = [one.bind(launch) for one in moe.BACKENDS if one.op == "moe.experts"]
    registry = Registry((*declared, *REFERENCE_BACKENDS))
    on = Platform("cpu", Target("cuda", (9, 0)), registry, "interpreter")
    case = OPS["moe.experts"].small_cases[0]
    candidates = registry.candidates("moe.experts", case, on.target)
    assert candidates == ("triton", "triton:lower", "triton:taller")
    made = Work("moe.experts", case, {rows: (Load(rows, 100),)}, candidates)
    for name in candidates:
        assert Bench(on, seed=5).problem(made, name) == ""


@pytest.mark.parametrize("case", OPS["moe.route_learned"].small_cases, ids=str)
@pytest.mark.parametrize("op", ["moe.route_learned", "moe.route_hash"])
def test_narrow_routes_are_what_the_reference_is(op: str, case: RouteCase) -> None:
    if case not in OPS[op].small_cases:
        pytest.skip("experts are hashed in one group")
    declared = [one.bind(JitLauncher((9, 0), 132)) for one in route.BACKENDS]
    registry = Registry((*declared, *REFERENCE_BACKENDS))
    for variant in VARIANTS[op]:
        check(registry, op, "triton:narrow", case, variant)


def test_narrow_routes_add_few_parts_up() -> None:
    case = OPS["moe.route_learned"].cases["deepseek-v4-flash"][0]
    narrow, usual = route.narrow_cut_of(case, 1), route.cut_of(case, 1)
    assert (narrow.experts, narrow.splits, narrow.splits * narrow.slice) == (16, 8, case.width)
    assert usual.splits == 32 and route.narrow_cut_of(case, 65) == route.cut_of(case, 65)


def test_heights_of_tiles_move_within_what_there_is() -> None:
    case = OPS["moe.experts"].cases["deepseek-v4-flash"][0]
    heights = [[height_of(case, rows, step) for step in (-1, 0, 1)] for rows in (1, 1024, 10**6)]
    assert heights == [[16, 16, 32], [16, 32, 64], [64, 128, 128]]


def test_arrangements_are_ordered_by_their_time_on_paper() -> None:
    first, second, third = (arrangement(1, 96, 32, 132, place=place) for place in range(3))
    assert first == arrangement(1, 96, 32, 132)
    assert len({first, second, third}) == 3
    cycles = [_cycles(one, 1, 96, 32, 132) for one in (first, second, third)]
    assert cycles == sorted(cycles)
