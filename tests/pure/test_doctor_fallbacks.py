"""Checks that rank slow paths by what they cost."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.doctor.checks import fallbacks
from metainfer.doctor.estimate import predicted
from metainfer.doctor.finding import Finding, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.ops.kernel_order import NO_KERNEL

V4, GLM = read_shape("deepseek-v4-flash"), read_shape("glm-5.3")


def found(check, machine: str, shape=V4, **changes) -> list[Finding]:
    return list(check(Patient(machine_of(machine), shape=shape, **changes)))


def test_the_dearest_slow_path_comes_first_with_its_own_fix():
    (box,) = found(fallbacks.slow_paths, "l40s-x8")
    assert box.level == "warn" and "exchanges between cards" in box.what
    assert "--engine stock" in box.fix and box.source
    (alone,) = found(fallbacks.slow_paths, "rtx-pro-6000-x2")
    first = alone.evidence.partition("taken: ")[2].partition(" ")[0]
    assert first in alone.what and alone.fix  # what it is depends on calibration
    lost = [float(n) for n in re.findall(r"(\d+\.\d) of", alone.evidence.partition(";")[0])]
    assert lost == sorted(lost, reverse=True) and len(lost) == 4


def test_rates_are_those_of_the_cost_model():
    (box,) = found(fallbacks.slow_paths, "l40s-x8")
    now = predicted(V4, machine_of("l40s-x8"), 8)
    assert now is not None and f"{now.input_per_s:,.0f} input tok/s as it comes" in box.matters
    each = [int(n.replace(",", "")) for n in re.findall(r" ([\d,]{4,})(?:,|;| and)", box.matters)]
    assert all(rate > now.input_per_s for rate in each)
    (gap,) = found(fallbacks.missing, "l40s-x8")
    assert gap.level == "ok" and "sparse attention" in gap.what and "%" in gap.what


@pytest.mark.parametrize("check", [fallbacks.slow_paths, fallbacks.missing])
def test_nothing_is_said_where_nothing_fits_or_is_known(check):
    assert not found(check, "rtx-5070ti-x2", GLM)
    assert not found(check, "l40s-x8", None)
    assert not list(check(Patient(replace(machine_of("l40s-x8"), gpus=Unknown("no")), shape=V4)))


def row(op: str, times: int, *, ok: bool = True, refused=(), served=True, phase="prefill") -> dict:
    return {
        "op": op, "phase": phase, "times": times, "ok": ok, "served": served, "backend": "triton",
        "problems": [] if ok else ["only the reference serves it"],
        "refused": [{"backend": b, "reason": r} for b, r in refused],
        "least": {"rows": 2048, "tokens": 8192, "flops": 0.0, "bytes": 1e9, "operands": "bfloat16"},
    }  # fmt: skip


def test_own_kernels_are_ranked_by_times_and_floor():
    refused = [("cuda", "is of sm_90 alone")]
    rows = [
        row("rope.rotate", 1, refused=refused),
        row("moe.experts", 40, refused=refused),
        row("moe.experts", 40, refused=refused, phase="decode"),
        row("linear.dense", 90, refused=[("cuda", NO_KERNEL)]),
        row("linear.grouped", 99, refused=refused, served=False),
        row("norm.rms_norm", 2, ok=False),
    ]
    (one,) = found(fallbacks.passed_over, "l40s-x8", coverage={2: {"rows": rows}})
    assert one.what.startswith("moe.experts takes") and "TP2" in one.evidence
    order = ["moe.experts", "norm.rms_norm", "rope.rotate", "decode moe.experts"]
    assert [one.evidence.index(name) for name in order] == sorted(
        one.evidence.index(name) for name in order
    )
    assert "only the reference" in one.evidence and "linear" not in one.evidence
    assert not found(fallbacks.passed_over, "l40s-x8", coverage={1: {"rows": rows[3:4]}})
    assert not found(fallbacks.passed_over, "l40s-x8", coverage=Unknown("no triton"))
