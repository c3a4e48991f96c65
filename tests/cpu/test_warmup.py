"""Warm-up: which steps are run before the first request."""

from __future__ import annotations

import time

import pytest

from metainfer.arch.cache_kinds import blocks_for
from metainfer.arch.tiny import tiny_quantised_arch
from metainfer.hardware.machine import Gpu
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
    steps = [step for step in runner.asked if isinstance(step, Step)]
    for step in steps:
        slots = [part.state_slot for part in step.sequences]
        assert len(set(slots)) == len(slots) and max(slots) < plan.max_num_seqs.value
        assert step.num_rows <= plan.max_num_batched_tokens.value
        for part in step.sequences:
            end = part.start + len(part.token_ids)
            assert part.start >= 0 and end <= plan.max_model_len.value
            assert len(part.blocks) == blocks_for(end) <= plan.num_blocks.value
    if device == "cuda":
        sizes = {len(step.sequences[-1].token_ids) for step in steps}
        assert set(row_classes(300)) <= sizes
        assert any(0 < step.num_decode_sequences < len(step.sequences) for step in steps)
    else:
        assert len(steps) == 4


def test_on_a_gpu_few_rows_do_not_tell_what_many_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 rows took 20 ms on an H200, as long as starting their kernels takes, and 8,192 took 40."""
    monkeypatch.setattr("metainfer.llm.warmup._LONGEST_S", 0.01)
    plan, runner = made("cuda", max_num_seqs=2, max_num_batched_tokens=2048), Noting(0.001)
    warm_up(runner, plan)
    rows = [step.num_rows for step in runner.asked if isinstance(step, Step)]
    assert max(rows) == 2048 and set(row_classes(2048)) <= set(rows)
