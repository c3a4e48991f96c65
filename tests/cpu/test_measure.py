"""Measuring how ranks talk, with processes that share memory in place of GPUs."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch

from metainfer.comm import measure as measuring
from metainfer.comm import payload
from metainfer.comm.measure import measure
from metainfer.comm.measure_rates import RateWork
from metainfer.comm.move_kernel import start_move
from metainfer.hardware.curves import ALL_TO_ALL, COPY, LOAD, MEANS, NCCL, RING, STAGED, STORE
from metainfer.hardware.machine import Gpu, Machine
from metainfer.hardware.measured import read_measured, sentences
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.ops.base import Load
from metainfer.ops.linear import DenseCase
from tests.fakes import shared_engine
from tests.fakes.machines import GIB, make_machine

SIZES = (1024, 2**16)


def machine_of(count: int) -> Machine:
    return make_machine(gpus=(Gpu("a card", (12, 0), 96 * GIB, 95 * GIB),) * count)


def measured(make, cache: Path, count: int = 2, sizes=SIZES, machine=None, **more) -> tuple:
    said: list[str] = []
    found = measure(
        machine or machine_of(count), said.append, lambda done, total: None,
        make=make, sizes=sizes, works=more.pop("works", ()), device="cpu", cache=cache, **more,
    )  # fmt: skip
    assert not multiprocessing.active_children()
    return found, said


def test_all_means_are_measured_verified_and_kept(tmp_path):
    work = RateWork("product bf16", 16, "linear.dense", DenseCase(64, 64, "float32"), Load(16))
    odd = replace(work, case=DenseCase(64, 64, "float32", "nonsense"))
    copies = RateWork("copy", 0)
    before = machine_of(3)
    found, _ = measured(shared_engine.honest, tmp_path, 3, works=(copies, work, odd))
    assert {curve.means for curve in found.curves} == set(MEANS)
    assert all(curve.verified and curve.trusted for curve in found.curves)
    assert all(min(curve.seconds) > 0 for curve in found.curves)
    has = {(c.means, c.operation, c.gpus, c.at_once): c.bytes for c in found.curves}
    for means in (STORE, LOAD, COPY):
        assert has[means, RING, (0, 1, 2), True] == has[means, "copy", (2, 0), False] == SIZES
        assert has[means, ALL_TO_ALL, (0, 1, 2), True] == SIZES
    assert has[STAGED, RING, (0, 1, 2), True] == SIZES
    assert has[NCCL, "all_reduce", (0, 1, 2), True] == has[NCCL, "all_reduce", (0, 1), True]
    assert has[NCCL, "all_gather", (0, 1, 2), True] == (1024,)
    assert "as it comes, bf16, " in next(c.source for c in found.curves if c.means == NCCL)
    assert [(rate.work, rate.per_s > 0) for rate in found.rates] == [
        ("copy", True), ("product bf16", True),
    ]  # fmt: skip
    assert len(found.unmeasured) == 1 and "product bf16, 16 rows" in found.unmeasured[0]
    kept = read_measured(before, tmp_path)
    assert not isinstance(kept, str) and kept.of(before) == found
    assert Machine.from_json(found.to_json()) == found
    assert any("push" in line for line in sentences(found))


def test_ranks_that_lie_hang_or_die_cost_their_own_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_LONGEST_ANSWER_S", 1.5)
    monkeypatch.setattr(measuring, "_MOST_LOST", 1)
    found, said = measured(shared_engine.sick, tmp_path)
    wrong = [curve for curve in found.curves if not curve.verified]
    assert [(c.means, c.operation, c.gpus) for c in wrong] == [
        (STORE, "copy", (1, 0)), (STORE, RING, (0, 1)),
    ]  # fmt: skip
    assert all(c.bytes == (1024,) and not c.trusted for c in wrong)
    assert "1 of 16384 words from 1 to 0 are wrong, from byte 32768 on" in wrong[0].source
    assert sum("wrong data arrives" in line for line in (*said, *sentences(found))) == 4
    sound = {(c.means, c.operation, c.gpus) for c in found.curves if c.verified}
    assert {(STORE, "copy", (0, 1)), (COPY, "copy", (0, 1))} <= sound
    assert (NCCL, "all_reduce", (0, 1)) in sound and (STAGED, "copy", (1, 0)) in sound
    assert found.unmeasured == (
        "peer load, copy over 0,1: the process of GPU 1 did not answer in time",
        "copy engine, pull over 0,1: the process of GPU 1 ended with SIGKILL",
        "peer load, copy over 1,0; ring over 0,1: left alone after failing before",
        "copy engine, copy over 1,0; pull over 1,0; ring over 0,1: left alone after failing before",
    )


def test_a_rank_that_cannot_begin_leaves_the_others(tmp_path):
    found, _ = measured(shared_engine.without_one, tmp_path, sizes=(1024,))
    assert found.unmeasured == ("GPU 1: torch sees no GPU",)
    assert {curve.gpus for curve in found.curves} == {(0,)} and len(found.curves) == 4


def test_what_cannot_be_kept_is_not_lost(tmp_path):
    (tmp_path / "file").write_text("no folder")
    found, said = measured(shared_engine.honest, tmp_path / "file", sizes=(1024,), count=1)
    assert found.curves and any("not kept for the next time" in line for line in said)


def test_a_rank_that_dies_at_once_is_said(tmp_path):
    found, _ = measured(shared_engine.dead, tmp_path)
    assert not found.curves and not list(tmp_path.iterdir())
    assert found.unmeasured == ("how GPUs talk: the process of GPU 1 ended with code 3",)


def test_what_does_not_fit_the_time_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_END_S", 0.0)
    found, _ = measured(shared_engine.honest, tmp_path, longest_s=0.01)
    assert not found.curves
    assert "did not answer in time" in found.unmeasured[0]


def test_little_free_memory_shortens_curves(tmp_path):
    full = replace(machine_of(1).gpus[0], free_bytes=2 * GIB)
    found, _ = measured(
        shared_engine.honest, tmp_path, machine=replace(machine_of(1), gpus=(full,))
    )
    assert {curve.bytes for curve in found.curves} == {(1024,)}
    assert found.unmeasured == ("beyond 1.0 kB: of one GPU 2.1 GB are free",)


def test_the_kernel_moves_all_words_and_no_other():
    source = torch.arange(1, 20001, dtype=torch.int32)
    target = torch.zeros(20016, dtype=torch.int32)
    start_move(JitLauncher((9, 0), 1), target[16:], source, 4 * 16016, 1)
    assert torch.equal(target[16:16032], source[:16016])
    assert not target[:16].any() and not target[16032:].any()


def test_payloads_tell_where_every_word_is_from():
    words = 4096
    slot = torch.empty(words + payload.GUARD_BYTES // 4, dtype=torch.int32)

    def problem(sent=(1, 2, 7), harm=None) -> str:
        payload.poison(slot)
        if sent is not None:
            payload.fill(slot[:words], *sent)
        if harm is not None:
            harm()
        return payload.problem(slot, words, 1, 2, 7)

    assert problem() == ""
    assert problem(sent=None).endswith("from byte 0 on: nothing arrived")
    assert "they are of an earlier round" in problem(sent=(1, 2, 6))
    assert "they are of 3" in problem(sent=(3, 2, 7))
    shifted = problem(harm=lambda: slot[100:words].copy_(slot[99 : words - 1].clone()))
    assert "from byte 400 on: they were never sent" in shifted
    assert "behind its end" in problem(harm=slot[words:].zero_)
