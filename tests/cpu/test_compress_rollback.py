"""Compressors of an incremental caller that takes draft tokens back, as `ops/compress.py` says."""

from __future__ import annotations

import random

import pytest
import torch

from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import triton_backends
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.ops.catalogue import OPS
from metainfer.ops.compress import CompressCase
from tests.fakes.op_checks import assert_near

REGISTRY = Registry((*triton_backends(JitLauncher((9, 0), 4)), *CPU_BACKENDS, *REFERENCE_BACKENDS))
CASES = (
    CompressCase(4, 24, 8, overlap=True, dtype="float32"),
    CompressCase(2, 16, 0, overlap=False, eps=1e-20, dtype="float32"),
    CompressCase(8, 16, 8, overlap=False),
)
DRAFT = 3  # tokens of a step beyond the first
TOKENS = 40


def incremental(case: CompressCase, rows_NW: torch.Tensor, backend: str) -> torch.Tensor:
    """Entries of a sequence whose steps write up to 1 + DRAFT rows, of which some are rejected:
    those hold other numbers than the rows that come in their places."""
    compress = REGISTRY.backends("attention.compress_decode")[backend].run
    draw, chance = Draw(9), random.Random(9)
    weight_D, rotation_ER2 = constants(case)
    size = case.span + DRAFT
    ring_NW = torch.full((size, case.row_width), torch.nan)
    entries_ED = torch.full((TOKENS // case.ratio, case.width), torch.nan)
    known = 0
    while known < TOKENS:
        written = min(1 + DRAFT, TOKENS - known)
        accepted = chance.randint(1, written)
        for place in range(written):
            is_true = place < accepted
            row_W = rows_NW[known + place] if is_true else draw.normal(case.row_width)
            ring_NW[(known + place) % size] = row_W
        ends = [p for p in range(known, known + written) if (p + 1) % case.ratio == 0]
        if ends:
            back_S = torch.arange(1 - case.span, 1)
            positions_CS = torch.tensor(ends).unsqueeze(1) + back_S
            rows_CS = torch.where(positions_CS < 0, -1, positions_CS % size)
            windows = torch.tensor(ends) // case.ratio
            found = compress(case, ring_NW, rows_CS, weight_D, rotation_ER2[windows])
            entries_ED[windows] = found.float()
        known += accepted
    return entries_ED


def constants(case: CompressCase) -> tuple[torch.Tensor, torch.Tensor]:
    draw = Draw(4)
    return draw.normal(case.width), draw.rotation(TOKENS // case.ratio, case.rope_width)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_entries_after_rejected_drafts_are_those_of_prefill(
    case: CompressCase, backend: str
) -> None:
    rows_NW = Draw(3).normal(TOKENS, case.row_width)
    before = rows_NW.new_full((case.ratio if case.overlap else 0, case.row_width), torch.nan)
    prefill = REGISTRY.backends("attention.compress")["reference"].run
    expected = prefill(case, torch.cat([before, rows_NW]), 0, *constants(case)).float()
    tolerance = OPS["attention.compress"].tolerance.of(case.dtype)
    assert_near(incremental(case, rows_NW, backend), expected, tolerance)
