"""Verification holds two copies of its inputs at most: of experts one takes gigabytes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from metainfer.kernels import verify
from metainfer.kernels.inputs.series import draw_one
from metainfer.kernels.platform import Platform
from metainfer.kernels.reference import BACKENDS
from metainfer.kernels.reference.norm import rms_norm
from metainfer.kernels.registry import Backend, Registry
from metainfer.kernels.verify_run import Check
from metainfer.ops.base import Load, Target
from metainfer.ops.norm import RmsNormCase

OP = "norm.rms_norm"


def test_two_copies_of_inputs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[weakref.ref[Any]] = []
    held: list[int] = []

    def draw(*arguments: Any) -> Any:
        call = draw_one(*arguments)
        drawn.append(weakref.ref(call.arguments[0]))
        held.append(sum(one() is not None for one in drawn))
        return call

    monkeypatch.setattr(verify, "draw_one", draw)
    registry = Registry((Backend(OP, "cpu", rms_norm), *BACKENDS))
    on = Platform("cpu", Target("cpu"), registry, "some cpu")
    outcome = verify.check(on, Check(OP, RmsNormCase(64), "decode", Load(4, 100)), "", seed=5)
    assert (outcome.backend, outcome.problem) == ("cpu", "")
    assert held == [1, 2, 1]
