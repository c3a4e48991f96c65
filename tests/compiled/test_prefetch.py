"""Code that asks for weights: with the instruction that each kind of card has, and one piece of it
for all large weights."""

from __future__ import annotations

import pytest
import torch

from metainfer.kernels.triton import prefetch
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.prefetch import PrefetchCase
from metainfer.ops.targets import CARD_KINDS

BULK = ("sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize("target", CARD_KINDS)
def test_code_asks_for_pieces_or_for_sectors(target: str) -> None:
    kind = CARD_KINDS[target]
    launch = RecordingLauncher(kind.capability, kind.multiprocessors)
    for size, taken in ((2**25, 2**24), (2**25, 2**25), (2**28 + 16, 2**24)):
        weight_N = torch.empty(size, dtype=torch.uint8, device="meta")
        prefetch.prefetch(launch, PrefetchCase(size, taken), weight_N)
    (unit,) = launch.units()
    ptx = unit.compile(kind.capability).asm["ptx"]
    assert ptx.count("cp.async.bulk.prefetch.L2.global") == (target in BULK)
    assert ptx.count("prefetch.global.L2") == (target not in BULK)
    assert "ld.global" not in ptx and "st.global" not in ptx
