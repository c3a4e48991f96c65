"""Verification by several processes: each has its share of memory, what needs more comes alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from metainfer.cli.verify import memory_for, usual_workers
from metainfer.hardware.facts import Unknown
from metainfer.hardware.probe import probe
from metainfer.kernels import memory_bound, verify_run
from metainfer.kernels import verify as verify_module
from metainfer.kernels.compare import Comparison
from metainfer.kernels.platform import Platform
from metainfer.kernels.verify_run import Check, Where
from metainfer.ops.base import Load
from metainfer.ops.floor import Rates
from metainfer.ops.norm import RmsNormCase

OP = "norm.rms_norm"
CASE = RmsNormCase(64)


def test_a_process_takes_no_more_memory_than_its_share() -> None:
    program = """
import torch
from metainfer.kernels.memory_bound import bound_memory, is_out_of_memory
bound_memory("cpu", 200 * 2**20)
kept = torch.zeros(100 * 2**20, dtype=torch.uint8)
try:
    torch.zeros(110 * 2**20, dtype=torch.uint8)
except RuntimeError as error:
    print(is_out_of_memory(error), is_out_of_memory(RuntimeError("an illegal access")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("True False\n", 0), done.stderr


@pytest.mark.parametrize(("most", "problem"), [(100, ""), (99, "MemoryError: 100 are wanted")])
def test_what_needs_more_than_its_share_of_memory_is_compared_alone(
    most: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers in turn, in this process; the second check takes 100 bytes."""
    bounds: list[int] = []
    seen: list[tuple[Check, int]] = []

    def one_by_one(work: Any, common: Any, shares: Any, on_result: Any, *_: Any) -> None:
        for share in shares:
            work(SimpleNamespace(send=lambda result: on_result(*result)), common, share)

    def compared(_on: Platform, one: Check, *_: Any) -> Comparison:
        seen.append((one, bounds[-1]))
        if one.load.rows == 2 and bounds[-1] < 100:
            raise MemoryError("100 are wanted")
        return Comparison(0.0, "")

    monkeypatch.setattr(verify_run, "in_processes", one_by_one)
    monkeypatch.setattr(verify_module, "_compared", compared)
    monkeypatch.setattr(verify_module, "clock", lambda *_: 1.0)
    monkeypatch.setattr(memory_bound, "bound_memory", lambda device, most: bounds.append(most))
    monkeypatch.setattr(verify_module, "rates_of", lambda on: Rates(1.0, {}, 1.0))
    checks = [Check(OP, CASE, "decode", Load(rows, 100)) for rows in (1, 2, 3)]
    told: list[int] = []
    where = Where("cpu", None, "", 5)
    done = verify_run.verify(where, checks, 4, lambda n, of: told.append(n), None, most)
    assert seen == [*((one, most // 4) for one in checks), (checks[1], most)]
    assert [outcome.problem for outcome in done.outcomes if outcome] == ["", problem, ""]
    assert told == list(range(1, 6 if problem else 7))


def test_workers_are_as_many_as_free_memory_holds() -> None:
    machine = probe()
    free = replace(machine.memory, available_bytes=20 * 10**9)
    machine = replace(machine, memory=free)
    assert memory_for(machine, "cpu", None) == 18 * 10**9
    assert memory_for(replace(machine, gpus=()), "cuda", 10**10) == 9 * 10**9
    cores = replace(machine.cpu, physical_cores=8)
    machine = replace(machine, cpu=cores)
    assert [usual_workers(machine, n * 2**30) for n in (1, 13, 100)] == [1, 2, 4]
    unknown = replace(machine, memory=replace(free, available_bytes=Unknown("it is not said")))
    assert memory_for(unknown, "cpu", None) is None
    assert usual_workers(unknown, None) == 4
