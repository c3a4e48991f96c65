"""The products of experts in Gluon, on a machine of our own against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.kernels.compare import Poisoned, near
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.moe import experts_fp8_rows
from metainfer.kernels.reference import moe as reference
from metainfer.kernels.triton import moe
from metainfer.kernels.triton.moe_tiles import Tile, Tiles
from metainfer.ops.catalogue import OPS
from metainfer.ops.moe import ExpertsFp8RowsCase
from tests.fakes.gluon_machine import GluonLauncher

OP = "moe.experts_fp8_rows"
CASE = ExpertsFp8RowsCase(3, 2, 512, 256, 1.0)
TILES = [
    Tiles(64, Tile(64, 128, 4, 3, overlaps=True), Tile(128, 128, 4, 3, overlaps=True)),
    Tiles(128, Tile(32, 128, 8, 4, band=1, overlaps=True), Tile(64, 128, 8, 4, overlaps=True)),
]


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.rows} slots")
@pytest.mark.parametrize("scale", ["e8m0", "fp32"])
def test_experts(tiles: Tiles, scale: str) -> None:
    case = replace(CASE, scale=scale)
    # An expert has a third as many rows: of 128 slots a tile that is full and one that is not.
    rows = 100 if tiles.rows == 64 else 420
    call = experts_fp8_rows(case, Draw(3), rows=rows, empty=True, scales="e8m0")
    launch = GluonLauncher((9, 0), 4)
    with Poisoned():
        weights = moe.prepare_fp8_rows(case, *call.weights)
        ours = moe.experts_fp8_rows(launch, case, weights, *call.arguments, tiles=tiles)
    assert launch.ran.count("grouped_wgmma") == 2
    expected = reference.experts_fp8_rows(case, call.weights, *call.arguments)
    found = near(ours, expected, OPS[OP].tolerance.of("bfloat16"))
    assert not found.problem, found.problem
