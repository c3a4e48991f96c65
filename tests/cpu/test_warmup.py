"""Warm-up: which steps are run before the first request."""

from __future__ import annotations

import time

import pytest

from metainfer.arch.cache_kinds import blocks_for
from metainfer.arch.tiny import tiny_quantised_arch
from metainfer.hardware.machine import Gpu
from metainfer.llm.made_steps import prefill, scored, step
from metainfer.llm.step import Step
from metainfer.llm.warmup import row_classes, warm_up
from metainfer.ops.base import Target
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.plan.build import build_plan
from metainfer.plan.plan import Plan
from metainfer.plan.settings import EngineSettings
from tests.fakes.machines import GIB, make_machine


class Noting:
    """Stands for a runner; notes what it is asked. Each step takes `step_s`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.asked: list[Step | str] = []
        self._step_s = step_s

    def dry_run(self, step: Step) -> None:
        self.asked.append(step)
        time.sleep(self._step_s)

    def capture(self) -> None:
        self.asked.append("capture")


def made(device: str, **flags: object) -> Plan:
    target = Target("cuda", (12, 0)) if device == "cuda" else Target("cpu")
    able = Capabilities(target, dict.fromkeys(OPS, ("any",)), ("any",), frozenset())
    machine = make_machine(gpus=(Gpu("a card", (12, 0), 96 * GIB, 90 * GIB),))
    return build_plan(machine, tiny_quantised_arch(), EngineSettings(**flags), able)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 100, 2048])
def test_classes_of_rows(most: int) -> None:
    classes = row_classes(most)
    assert classes == sorted(set(classes)) and classes[-1] == most and classes[0] >= 1
    for power in (2**n for n in range(12)):
        assert power > most or {power, max(1, power - 1)} <= set(classes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_keep_to_the_plan(device: str) -> None:
    plan, runner = made(device, max_num_seqs=5, max_num_batched_tokens=300), Noting()
    warm_up(runner, plan)
    assert runner.asked.count("capture") == 1
    steps = [one for one in runner.asked if isinstance(one, Step)]
    for one in steps:
        slots = [part.state_slot for part in one.sequences]
        assert len(set(slots)) == len(slots) and max(slots) < plan.max_num_seqs.value
        assert one.num_rows <= plan.max_num_batched_tokens.value
        for part in one.sequences:
            end = part.start + len(part.token_ids)
            assert part.start >= 0 and end <= plan.max_model_len.value
            assert len(part.blocks) == blocks_for(end) <= plan.num_blocks.value
    if device == "cuda":
        sizes = {len(one.sequences[-1].token_ids) for one in steps}
        assert set(row_classes(300)) <= sizes
        assert any(0 < one.num_decode_sequences < len(one.sequences) for one in steps)
    else:
        assert len(steps) == 4


def test_on_a_gpu_few_rows_do_not_tell_what_many_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 rows took 20 ms on an H200, as long as starting their kernels takes, and 8,192 took 40."""
    monkeypatch.setattr("metainfer.llm.warmup._LONGEST_S", 0.03)
    plan, runner = made("cuda", max_num_seqs=2, max_num_batched_tokens=2048), Noting(0.001)
    warm_up(runner, plan)
    rows = [one.num_rows for one in runner.asked if isinstance(one, Step)]
    assert max(rows) == 2048 and set(row_classes(2048)) <= set(rows)


def test_steps_that_were_found_are_run_small_ones_first() -> None:
    plan, runner = made("cuda", max_num_seqs=2, max_num_batched_tokens=64), Noting()
    found = [step([prefill(50, 37)]), step([scored(prefill(9, 9))])]
    warm_up(runner, plan, found)
    steps = [one for one in runner.asked if isinstance(one, Step)]
    assert steps.index(found[1]) < steps.index(found[0])


def test_steps_of_a_slow_path_end_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("metainfer.llm.warmup._LONGEST_S", 0.0)
    plan, runner = made("cuda", max_num_seqs=2, max_num_batched_tokens=2048), Noting(0.001)
    warm_up(runner, plan)
    assert "larger ones are not run" in caplog.text
    rows = [one.num_rows for one in runner.asked if isinstance(one, Step)]
    assert 32 < max(rows) < 100
