"""What tiles of products may not change: slices of columns, who adds them, forms of operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metainfer.kernels.compare import Poisoned
from metainfer.kernels.inputs import linear as inputs
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import linear as reference
from metainfer.kernels.triton import linear
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.product import Sizes, Tile, few_tile, tall_tile, weight_of
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.linear import DenseCase, Fp8RowsCase, GroupedFp8RowsCase
from tests.fakes.op_checks import assert_near

LAUNCH = JitLauncher((8, 9), 4)
FEW = Tile(16, 64, 64, 4, 2)


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("ticket", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_slices_of_columns_add_up(splits: int, ticket: bool, capability: tuple[int, int]) -> None:
    """Also where the last slices have fewer steps or none; tickets are zero again for the next."""
    case = GroupedFp8RowsCase(2, 72, 320, group=64, dtype="float32")
    call = inputs.grouped_fp8_rows(case, Draw(3), 5)
    weight = linear.prepare_codes(case, *call.weights)
    expected = reference.grouped_fp8_rows(case, call.weights, *call.arguments)
    tile = replace(FEW, splits=splits, ticket=ticket)
    for _ in range(2):
        with Poisoned():
            y_TO = linear.grouped_fp8_rows(
                JitLauncher(capability, 4), case, weight, *call.arguments, tile=tile
            )
        assert_near(y_TO, expected, 1e-5)
    assert not weight.tickets.any()


def test_slices_of_both_parts_of_a_weight_add_up() -> None:
    case = DenseCase(40, 130, out_dtype="float32")
    call = inputs.dense(case, Draw(4), 9, dtype="float32")
    expected = reference.dense(case, call.weights, *call.arguments)
    weight = linear.prepare_dense(case, *call.weights)
    assert len(weight.numbers_POI) == 2
    for splits in (1, 2, 4):
        y_TO = linear.dense(LAUNCH, case, weight, *call.arguments, tile=replace(FEW, splits=splits))
        assert_near(y_TO, expected, 1e-5)


def test_tiles_of_one_block_and_of_several_are_equal() -> None:
    case = Fp8RowsCase(200, 256, dtype="float32")
    for rows in (6, 130):
        call = inputs.fp8_rows(case, Draw(5), rows, scales="fp32")
        expected = reference.fp8_rows(case, call.weights, *call.arguments)
        weight = linear.prepare_codes(case, *call.weights)
        for outputs in (32, 64, 128, 256):
            tile = Tile(16, outputs, 128, 4, 2)
            y_TO = linear.fp8_rows(LAUNCH, case, weight, *call.arguments, tile=tile)
            assert_near(y_TO, expected, 1e-5)


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    case = Fp8RowsCase(96, 256, dtype="float32")
    for rows, capability in ((6, (9, 0)), (6, (8, 0)), (130, (9, 0)), (130, (8, 0))):
        call = inputs.fp8_rows(case, Draw(6), rows)
        codes_TI, scales_TG = call.arguments
        scales_TG[3, 1] = 255
        y_TO = linear.fp8_rows(
            JitLauncher(capability, 4),
            case,
            linear.prepare_codes(case, *call.weights),
            *call.arguments,
        )
        assert y_TO[3].isnan().all()
        others = torch.arange(rows) != 3
        expected = reference.fp8_rows(case, call.weights, codes_TI[others], scales_TG[others])
        assert_near(y_TO[others], expected, 1e-5)


def test_slices_keep_multiprocessors_busy_but_partial_results_small() -> None:
    launch = RecordingLauncher((9, 0), 132)
    codes = torch.empty(1, 4096, 4096, dtype=torch.uint8, device="meta")
    weight = weight_of(codes, torch.empty(32, 32, device="meta"), (1, 4096))
    sizes = Sizes(1, 4096, 4096, (128, 128), 128)
    for rows, form in ((1, "fp8"), (64, "half")):
        tile = few_tile(launch, sizes, weight, form, rows)
        assert 132 <= 64 * tile.splits <= 4 * 132
        assert tile.splits * tile.rows * 8 <= 4096
    head = replace(sizes, rows=129280)
    assert few_tile(launch, head, weight, "bf16", 1).splits == 1
    assert tall_tile(launch, sizes, weight, "fp8", 65).rows == 64
    assert tall_tile(launch, sizes, weight, "fp8", 8192).rows == 128
