"""Hyper-connections of many rows on this GPU, as its code or that of an older one."""

from __future__ import annotations

import pytest
import torch

from metainfer.kernels.compare import Poisoned, near
from metainfer.kernels.inputs import hc as inputs
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import hc as reference
from metainfer.kernels.triton import hc
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.portable import PtxLauncher
from metainfer.ops.hc import MIX_NORM, HyperCase
from metainfer.ops.targets import parse_capability

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
TURNS = 5


@pytest.mark.parametrize("rows", [1, 64, 2000])
def test_mix_is_right_and_the_same_every_time(rows: int, request: pytest.FixtureRequest) -> None:
    code_for = request.config.getoption("as_target")
    launch = PtxLauncher(parse_capability(code_for)) if code_for else JitLauncher()
    case = HyperCase(4, 4096)
    call = inputs.mix_norm(case, Draw(1, "cuda", in_place=True), rows)
    mixes = hc.prepare_mix(case, *call.weights)
    with Poisoned():
        turns = [hc.mix(launch, case, mixes, *call.arguments) for _ in range(TURNS)]
    expected = reference.mix_norm(case, call.weights, *call.arguments)
    for place, theirs in enumerate(expected):
        found = near(turns[0][place], theirs, MIX_NORM.tolerance.of(case.dtype))
        assert not found.problem, found.problem
        assert all(torch.equal(turn[place], turns[0][place]) for turn in turns)
