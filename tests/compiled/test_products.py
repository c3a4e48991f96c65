"""Code of products with weights: how many pieces serve all counts of rows, and that they fit."""

from __future__ import annotations

import pytest

from metainfer.kernels.inputs import linear as inputs
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.triton import linear
from metainfer.kernels.triton.compile_all import compile_all
from metainfer.kernels.triton.launch import shared_limit
from metainfer.kernels.triton.machine_code import MachineCode
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.linear import Fp8RowsCase
from metainfer.ops.targets import CARD_KINDS

CASE = Fp8RowsCase(4096, 4096)


def recorded(kind: str, counts: tuple[int, ...]) -> RecordingLauncher:
    """Products of so many rows each."""
    launch = RecordingLauncher(CARD_KINDS[kind].capability, CARD_KINDS[kind].multiprocessors)
    draw = Draw(0, "meta")
    weight = linear.prepare_codes(CASE, *inputs.fp8_rows(CASE, draw, 1).weights)
    for rows in counts:
        linear.fp8_rows(launch, CASE, weight, *inputs.fp8_rows(CASE, draw, rows).arguments)
    return launch


@pytest.mark.parametrize(
    ("counts", "pieces"),
    [
        ((1, 2, 3, 7, 15, 16), 1),
        ((17, 31, 32), 1),
        ((33, 50, 64), 2),  # the second adds slices
        ((65, 128, 200, 8192), 2),
        ((1000, 4097, 8192), 1),
        ((0,), 0),
    ],
)
def test_counts_of_rows_share_code(counts: tuple[int, ...], pieces: int) -> None:
    assert len(recorded("sm_90", counts).units()) == pieces


def test_code_fits_every_card_and_uses_its_matrix_units() -> None:
    jobs = [
        (unit, CARD_KINDS[kind].capability)
        for kind in CARD_KINDS
        for unit in recorded(kind, (8, 8192)).units()
    ]
    formats = {(8, 0): "16", (8, 6): "16"}
    for (unit, capability), code in compile_all(jobs, 2).items():
        assert isinstance(code, MachineCode), code
        assert code.shared_bytes <= shared_limit(capability)
        assert code.stack_bytes <= 64, (unit, capability)
        if unit.name.endswith("products"):
            assert any(formats.get(capability, "") in kind for kind in code.matrix)
            assert "emulated" not in code.matrix
