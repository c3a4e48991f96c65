"""Checks of a model on a machine: memory, layouts, support, kernels as plain records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.arch.families import known_names
from metainfer.arch.shape_of import read_shape
from metainfer.cli.foreign_flags import FOREIGN_FLAGS
from metainfer.core.errors import UserError
from metainfer.doctor.checks import coverage, layout, memory, support
from metainfer.doctor.estimate import tensor_sizes
from metainfer.doctor.finding import Finding, Patient
from metainfer.doctor.matrix import Cell, State, matrix
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.ops.base import Target
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import NO_KERNEL
from metainfer.plan.build import build_plan
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import search
from metainfer.plan.settings import EngineSettings
from metainfer.plan.workload import Workload
from tests.fakes.machines import make_machine

V4, V41, GLM = map(read_shape, ("deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5.3"))


def found(check, machine: str, shape=None, **changes) -> list[Finding]:
    return list(check(Patient(machine_of(machine), shape=shape, **changes)))


def only(check, machine: str, shape) -> Finding:
    (finding,) = found(check, machine, shape)
    return finding


def test_ledgers_say_what_fits_and_why_not():
    fits = only(memory.ledger, "rtx-6000d-x8", V41)
    assert fits.level == "ok" and "2 x TP4" in fits.what and "not as 4 x TP2" in fits.evidence
    bad = only(memory.ledger, "rtx-6000d-x8", GLM)
    assert bad.level == "warn" and "routed experts" in bad.evidence and "4 bits" in bad.fix
    assert not found(memory.ledger, "rtx-6000d-x8")


def test_engram_tables_need_a_host_that_holds_them():
    assert only(memory.host, "rtx-6000d-x8", V41).level == "ok"
    assert not found(memory.host, "rtx-6000d-x8", V4)
    machine = machine_of("rtx-6000d-x8")
    small = replace(machine, memory=replace(machine.memory, total_bytes=2**36,
                                            available_bytes=2**36))  # fmt: skip
    (finding,) = memory.host(Patient(small, shape=V41))
    assert finding.level == "fail" and "NVMe" in finding.fix


def test_room_that_is_left_is_told():
    assert only(memory.late, "rtx-6000d-x8", V41).level == "warn"  # TP4 leaves 4 GB
    assert only(memory.late, "rtx-pro-6000-x8", V4).level == "ok"


def of_layouts(machine: str, shape) -> dict[str, Finding]:
    return {finding.check: finding for finding in found(layout.layouts, machine, shape)}


def test_replicas_of_smaller_groups_beat_one_group_over_all():
    finding = of_layouts("rtx-6000d-x8", V41)[layout.WIDTH]
    assert finding.level == "warn" and "than as TP8" in finding.what
    assert "vllm serve MODEL" in finding.fix and "requests a second" in finding.matters
    assert layout.WIDTH not in of_layouts("rtx-pro-6000-x2", V41)  # fits nowhere
    assert layout.WIDTH not in of_layouts("h200-x1", V4)


@pytest.mark.parametrize("machine", ["rtx-6000d-x8", "l40s-x8", "rtx-pro-6000-x4", "b300-x8"])
@pytest.mark.parametrize("shape", [V4, V41], ids=["v4", "v41"])
def test_nothing_is_advised_that_the_plan_ranks_lower(machine, shape):
    ranked = search(shape, machine_of(machine), Workload(), RankLedgers(), profile="stock").ranked
    advised = of_layouts(machine, shape).get(layout.WIDTH)
    first = ranked[0].layouts.name
    gpus = len(machine_of(machine).gpus)
    wide = [one for one in ranked if one.layouts.prefill.tensor == gpus]
    if advised is None:
        assert not wide
    elif advised.level == "warn":
        assert f"as {first} than" in advised.what and f"as {first} (" in advised.matters
    else:
        assert ranked[0].prediction.requests_per_s < 1.15 * wide[0].prediction.requests_per_s


def test_what_fits_nowhere_fails_and_a_conversion_is_a_warning():
    fine = of_layouts("rtx-6000d-x8", V41)[layout.PLAN]
    assert fine.level == "ok" and "answers most requests" in fine.what
    assert of_layouts("rtx-5070ti-x2", V4)[layout.PLAN].level == "fail"
    assert "converted checkpoint" in of_layouts("rtx-6000d-x8", GLM)[layout.PLAN].what


def test_this_engine_says_what_it_serves():
    assert "not serve" in only(support.serves, "rtx-6000d-x8", V41).what
    several = only(support.serves, "rtx-6000d-x8", V4)
    assert "over 2 of the cards" in several.what and several.fix.endswith(
        "--tensor-parallel-size 2"
    )
    assert only(support.serves, "rtx-5070ti-x2", V4).level == "warn"
    assert only(support.serves, "rtx-6000d-x8", read_shape("pebble")).level == "ok"
    flags = only(support.flags, "rtx-6000d-x8", read_shape("pebble"))
    assert "without effect for pebble here: images" in flags.what


def cells(name: str, machine: str = "rtx-6000d-x8") -> dict[str, Cell]:
    return {one.feature: one for one in matrix(read_shape(name), machine_of(machine))}


@pytest.mark.parametrize("name", known_names())
def test_a_matrix_has_a_reason_for_every_cell(name: str):
    known = cells(name)
    assert all(cell.why for cell in known.values())
    served = read_shape(name).arch is not None
    assert (known["serving"].state is State.WORKS) is served
    assert (known["fp8 caches"].state is State.WORKS) is served


def test_flags_that_are_called_refused_are_refused():
    shape = read_shape("pebble")
    for cell in matrix(shape, machine_of("rtx-6000d-x8")):
        flag = cell.flag.split(" ")[0]
        if not flag.startswith("--") or cell.state is State.WORKS:
            continue
        if flag == "--tensor-parallel-size":
            able = Capabilities(Target("cpu"), dict.fromkeys(OPS, ("cpu",)), ("cpu",), frozenset())
            with pytest.raises(UserError, match="one"):
                build_plan(make_machine(), shape.arch, EngineSettings(tensor_parallel_size=2), able)
        else:
            assert flag in FOREIGN_FLAGS, flag


def test_features_that_a_model_lacks_have_no_effect():
    assert cells("deepseek-v4-flash")["images"].state is State.NO_EFFECT
    assert cells("deepseek-v4.1-flash")["images"].state is State.REFUSED
    assert cells("deepseek-v4-flash", "h200-x1")["replicas"].state is State.NO_EFFECT
    assert cells("pebble")["speculation"].state is State.REFUSED


def test_sizes_are_those_that_divide_and_for_which_there_are_cards():
    assert tensor_sizes(V4, 6) == [1, 2, 4]
    assert tensor_sizes(V4, 0) == []


def row(**changes) -> dict[str, object]:
    plain = {
        "op": "attention.sparse_prefill", "phase": "prefill", "served": True, "backend": "triton",
        "refused": [], "ok": True, "problems": [], "ran_on": None, "shared_bytes": 90_000,
    }  # fmt: skip
    return {**plain, **changes}


def report(ranks: int, *rows: dict[str, object], **changes) -> dict[str, object]:
    bad = sum(not one["ok"] for one in rows)
    plain = {
        "model": "m", "tensor_parallel_size": ranks, "target": "sm_120", "rows": rows,
        "shared_limit_bytes": 101_376, "covered": len(rows) - bad, "uncovered": bad,
    }  # fmt: skip
    return {**plain, **changes}


def test_gaps_are_told_by_layout_with_their_reasons():
    gap = row(ok=False, problems=["only the reference serves it"])
    known = {1: report(1, gap), 4: report(4, gap, row()), 8: report(8, row())}
    findings = found(coverage.covered, "rtx-6000d-x8", coverage=known)
    assert [str(one.level) for one in findings] == ["ok", "fail", "warn"]
    assert "TP8" in findings[0].what and "1 of 2 operations" in findings[2].what
    (unknown,) = found(coverage.covered, "rtx-6000d-x8", coverage=Unknown("no triton"))
    assert (unknown.level, unknown.evidence) == ("unknown", "no triton")


def test_kernels_that_pass_over_a_card_say_why():
    refused = [{"backend": "cuda", "reason": "sm_90 alone"}, {"backend": "x", "reason": NO_KERNEL}]
    (finding,) = found(
        coverage.gates, "rtx-6000d-x8", coverage={1: report(1, row(refused=refused))}
    )
    assert "cuda: sm_90 alone" in finding.evidence and "x:" not in finding.evidence
    assert not found(coverage.gates, "rtx-6000d-x8", coverage={1: report(1, row())})


def test_shared_memory_is_that_of_the_card():
    for size, level in ((101_376, "ok"), (147_456, "fail")):
        known = {1: report(1, row(shared_bytes=size))}
        (finding,) = found(coverage.shared, "rtx-6000d-x8", coverage=known)
        assert finding.level == level and f"{size:,}" in finding.evidence
    quick = {1: report(1, row(), compiled=False)}
    assert not found(coverage.shared, "rtx-6000d-x8", coverage=quick)


def test_what_was_compiled_only_is_not_called_proved():
    for ran, level in ((None, "unknown"), ("RTX 6000D", "ok")):
        known = {1: report(1, row(ran_on=ran))}
        (finding,) = found(coverage.ran, "rtx-6000d-x8", coverage=known)
        assert finding.level == level
