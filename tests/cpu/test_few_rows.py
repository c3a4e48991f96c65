"""The kernel of few rows in CUDA C++, its source run on the CPU, in all forms that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.kernels.cuda import few_rows
from metainfer.kernels.cuda.few_rows import Arrangement, arrangement
from metainfer.kernels.inputs import linear as inputs
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import linear as reference
from metainfer.kernels.triton import linear
from metainfer.ops.base import Target
from metainfer.ops.linear import DenseCase, Fp8RowsCase, GroupedCase, GroupedFp8RowsCase
from tests.fakes.few_rows_cpu import COMPILER, CpuLauncher

CODES = Fp8RowsCase(144, 384, dtype="float32")
TURNED = Fp8RowsCase(272, 1152, scale="fp32")
NARROW = Fp8RowsCase(96, 512, (32, 32), 32, dtype="float32")
GROUPED = GroupedFp8RowsCase(2, 128, 256)
NAMES = {
    Fp8RowsCase: "fp8_rows",
    GroupedFp8RowsCase: "grouped_fp8_rows",
    DenseCase: "dense",
    GroupedCase: "grouped",
}
PREPARED = {"dense": linear.prepare_dense, "grouped": linear.prepare_grouped}
ROUNDED = {"float32": 1e-5, "bfloat16": 5e-3}  # of the largest number

compiles = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("few_rows")


def run(
    launch: Any, case: Any, rows: int, made: Arrangement | None = None, **drawn: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel gives, what the reference gives)."""
    name = NAMES[type(case)]
    call = getattr(inputs, name)(case, Draw(rows, "cpu"), rows, **drawn)
    prepare = PREPARED.get(name, few_rows.prepare_codes)
    found = getattr(few_rows, name)(
        launch, case, prepare(case, *call.weights), *call.arguments, made
    )
    return found, getattr(reference, name)(case, call.weights, *call.arguments)


@compiles
@pytest.mark.parametrize(
    ("capability", "case", "rows", "made", "drawn"),
    [
        ((8, 9), CODES, 3, None, {}),
        ((9, 0), CODES, 3, None, {}),
        ((8, 0), CODES, 3, None, {}),
        ((8, 9), TURNED, 11, Arrangement(8, 4, 2), {"scales": "fp32", "spread": True}),
        ((9, 0), TURNED, 16, Arrangement(8, 4, 2), {"scales": "fp32", "spread": True}),
        ((8, 0), GROUPED, 8, Arrangement(8, 2, 3), {"spread": True}),
        ((9, 0), GROUPED, 1, Arrangement(16, 1, 3), {}),
        ((9, 0), DenseCase(112, 256, out_dtype="float32"), 5, None, {"spread": True}),
        ((8, 0), DenseCase(48, 1024), 16, Arrangement(8, 8, 2), {}),
        ((8, 9), DenseCase(64, 128, out_dtype="float32"), 9, None, {"dtype": "float32"}),
        ((8, 9), CODES, 0, None, {}),
        ((8, 9), NARROW, 7, None, {}),
        ((9, 0), NARROW, 12, Arrangement(8, 2, 2), {"spread": True}),
        ((8, 0), GroupedFp8RowsCase(2, 32, 384, (32, 32), 32), 8, None, {"spread": True}),
        ((9, 0), GroupedCase(3, 32, 192, "dense"), 4, None, {}),
    ],
)
def test_products(
    folder: Path,
    capability: tuple[int, int],
    case: Any,
    rows: int,
    made: Arrangement | None,
    drawn: dict[str, Any],
) -> None:
    found, expected = run(CpuLauncher(capability, 4, folder), case, rows, made, **drawn)
    assert found.shape == expected.shape and found.dtype is expected.dtype
    if rows:
        bound = ROUNDED[str(found.dtype).removeprefix("torch.")]
        assert float((found - expected).abs().max()) <= bound * float(expected.abs().max())


@compiles
def test_rows_do_not_depend_on_how_many_come_with_them(folder: Path) -> None:
    launch = CpuLauncher((8, 9), 4, folder)
    call = inputs.fp8_rows(CODES, Draw(1, "cpu"), 7)
    weight = few_rows.prepare_codes(CODES, *call.weights)
    every = few_rows.fp8_rows(launch, CODES, weight, *call.arguments)
    one = few_rows.fp8_rows(launch, CODES, weight, *(x[4:5] for x in call.arguments))
    assert torch.equal(every[4:5], one)


def test_numbers_that_are_none_stay_where_they_are(folder: Path) -> None:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    call = inputs.fp8_rows(CODES, Draw(2, "cpu"), 3)
    codes, scales = call.arguments
    scales[1, 2] = 255
    weight = few_rows.prepare_codes(CODES, *call.weights)
    found = few_rows.fp8_rows(CpuLauncher((9, 0), 4, folder), CODES, weight, codes, scales)
    assert found[1].isnan().all() and not found[::2].isnan().any()


@pytest.mark.parametrize("processors", [1, 84, 132, 188])
@pytest.mark.parametrize(
    ("groups", "tiles", "units"),
    [(1, 96, 32), (1, 2048, 8), (8, 64, 32), (1, 8, 56), (1, 1, 1), (1, 8080, 64)],
)
def test_arrangements_can_be_started(groups: int, tiles: int, units: int, processors: int) -> None:
    made = arrangement(groups, tiles, units, processors)
    assert made.warps in few_rows.KERNELS
    assert made.slices <= min(made.warps, units)


def test_few_tiles_are_shared_and_many_are_not() -> None:
    assert arrangement(1, 96, 32, 132) == Arrangement(16, 16, 3)
    assert arrangement(1, 2048, 8, 132).slices == 1


def test_cases_that_are_refused_say_why() -> None:
    target = Target("cuda", (9, 0))
    small = few_rows.codes_eligible(Fp8RowsCase(64, 128, (64, 64), 64), target)
    assert small.reason == "takes no groups of 64 columns with blocks of (64, 64)"
    odd = few_rows.codes_eligible(Fp8RowsCase(200, 128), target)
    assert odd.reason == "200 x 128 are not whole tiles of 16 x 128"
    exact = few_rows.dense_eligible(DenseCase(64, 128, "float32", "float32"), target)
    assert exact.reason == "multiplies rows in bfloat16, not in float32"
    assert not few_rows.codes_eligible(CODES, Target("cpu"))
