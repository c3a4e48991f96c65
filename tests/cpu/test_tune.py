"""Tuning: wrong candidates are never bound, ranks agree, records count where they were made."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.cli.serve import say_kernels
from metainfer.cli.terminal import Terminal
from metainfer.comm.group import Solo
from metainfer.hardware.probe import probe
from metainfer.kernels import tune, tune_record, tune_run, verify_record
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.memory_bound import NoRoomError
from metainfer.kernels.platform import Platform
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.reference.norm import rms_norm
from metainfer.kernels.registry import Backend, Registry, Variant, no
from metainfer.kernels.tune import Bench, TimedRows, TuneSizes, Work, in_turns, works_of
from metainfer.kernels.tune_record import Found, find
from metainfer.kernels.tune_run import Finding, Place, Workers, agreed
from metainfer.kernels.tuned import NOT_TUNED
from metainfer.llm.engine import load_model
from metainfer.ops.base import Load, Target
from metainfer.ops.moe import SwigluCase
from metainfer.ops.norm import RmsNormCase
from metainfer.ops.use import BOTH, Use
from metainfer.plan.settings import EngineSettings
from metainfer.plan.tuning import Tuning, tuned_kernels
from metainfer.shipped import model_dir
from tests.fakes.command import metainfer
from tests.fakes.ranks import on_ranks

OP = "norm.rms_norm"
CASE = RmsNormCase(64)
CPU = Target("cpu")


def off(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    y_TD = rms_norm(case, x_TD, weight_D)
    y_TD[-1, -1] += 1
    return y_TD


def off_in_many(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return off(case, x_TD, weight_D) if len(x_TD) > 4 else rms_norm(case, x_TD, weight_D)


def unwritten(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return torch.empty(x_TD.shape, dtype=torch.bfloat16)


def spoiling(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    y_TD = rms_norm(case, x_TD, weight_D)
    x_TD.zero_()
    return y_TD


def broken(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of shared memory\nand more")


def bench(*backends: Backend) -> Bench:
    on = Platform("cpu", CPU, Registry((*backends, *REFERENCE_BACKENDS)), "some cpu")
    return Bench(on, seed=5)


def work(*candidates: str, rows: Sequence[int] = (1, 8)) -> Work:
    return Work(OP, CASE, {n: (Load(n, 100),) for n in rows}, candidates)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (rms_norm, ""),
        (off, "off by 1"),
        (off_in_many, "off by 1"),
        (unwritten, "off by nan"),
        (spoiling, "argument 0 was changed"),
        (broken, "RuntimeError: out of shared memory"),
    ],
)
def test_candidates_are_held_against_the_reference_at_all_rows(run: Any, problem: str) -> None:
    found = bench(Backend(OP, "cpu", run)).problem(work("cpu"), "cpu")
    assert found.startswith(problem)
    assert bool(found) == bool(problem)
    if run is off_in_many:
        assert found.endswith("(8 rows, 100 tokens)")


def test_candidates_that_passed_are_timed_and_variants_where_they_differ() -> None:
    made = bench(
        Backend(OP, "cpu", rms_norm, variants={"few": Variant(rms_norm, 4)}),
        Backend(OP, "native", rms_norm),
    )
    wanted = work("native", "cpu", "cpu:few")
    wanted.bad["native"] = "off by nan"
    first, second = made.times(wanted)
    assert (first.rows, set(first.seconds)) == (1, {"cpu", "cpu:few"})
    assert (second.rows, set(second.seconds)) == (8, {"cpu"})
    assert first.method == "series"
    assert all(0 < seconds < 1 for one in (first, second) for seconds in one.seconds.values())


def test_clocks_are_read_in_turns_in_both_orders() -> None:
    read: list[str] = []

    def clock(name: str) -> Callable[[], float]:
        return lambda: read.append(name) or len(read)

    assert set(in_turns({"a": clock("a"), "b": clock("b")})) == {"a", "b"}
    assert read[:6] == ["b", "a", "a", "b", "b", "a"]
    assert in_turns({"alone": clock("alone")})["alone"] > len(read) - 2


def test_works_have_all_candidates_at_all_rows_those_with_a_choice_first() -> None:
    registry = Registry(
        (
            Backend(OP, "native", rms_norm, lambda case, target: no("is not here")),
            Backend(OP, "cpu", rms_norm, variants={"few": Variant(rms_norm)}),
            Backend("moe.swiglu", "cpu", rms_norm),
            *REFERENCE_BACKENDS,
        )
    )
    swiglu = Use("moe.swiglu", SwigluCase(64, 7.0), ("decode",))
    uses = [swiglu, Use(OP, CASE, BOTH), Use("sample.draw", CASE)]  # the last has no backend
    norm, other = works_of(uses, registry, CPU, "", TuneSizes((64, 4096), (1, 8), (512,)), 1000)
    assert norm.candidates == ("cpu", "cpu:few")
    # All rows of a chunk, though 512 entries would be fewer; no more than the longest sequence has.
    assert norm.loads == {n: (Load(n, max(n, 512)),) for n in (1, 8, 64, 1000)}
    assert (other.op, list(other.loads)) == ("moe.swiglu", [1, 8])


# ---- ranks ----


def timed(rows: int, **seconds: float) -> TimedRows:
    return TimedRows(rows, (2048,), "graph", seconds)


def finding(*sizes: TimedRows, case: Any = CASE, **bad: str) -> Finding:
    return Finding(OP, case, sizes, tuple(bad.items()))


def test_the_slowest_rank_counts_and_a_failure_on_any_vetoes() -> None:
    wide = RmsNormCase(128)
    of_ranks = [
        [finding(timed(1, a=1.0, b=2.0), timed(8, a=1.0)), finding(timed(1, a=1.0), case=wide)],
        [finding(timed(1, a=3.0, b=1.0), timed(16, a=1.0), c="off by nan")],
    ]
    results = on_ranks(2, lambda ranks: (agreed(ranks, of_ranks[ranks.rank]), ranks.exchanges))
    (merged, count), (same, _) = results
    assert merged == same == [finding(timed(1, a=3.0, b=2.0), c="off by nan")]
    assert count == 2


def test_what_one_rank_found_bad_is_kept_though_another_had_no_time() -> None:
    of_ranks = [[], [finding(timed(1, a=1.0), c="off by nan")]]
    merged, _ = on_ranks(2, lambda ranks: agreed(ranks, of_ranks[ranks.rank]))
    assert merged == [finding(c="off by nan")]


class Pipe:
    """A connection whose other end is a function."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send


def here(stop_after: int | None = None) -> Callable[..., None]:
    """`in_processes` without processes; Ctrl-C comes after so many results."""

    def in_this_process(
        do: Any, common: Any, shares: Any, on_result: Any, on_failure: Any, *_: Any
    ) -> None:
        left = stop_after

        def tell(message: tuple[int, Any]) -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            on_result(*message)

        for share in shares:
            do(Pipe(tell), common, share)

    return in_this_process


def test_several_ranks_agree_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_run, "in_processes", here())
    monkeypatch.setattr(tune, "_LEAST_ROUNDS", 1)

    def tuned(ranks: Any) -> list[Finding]:
        found: list[Finding] = []
        told: list[Sequence[Finding]] = []
        works = [work("cpu", rows=(1,))]
        if ranks.rank == 1:
            works[0].bad["cpu"] = "off by nan"  # as a card with a fault would say
        left = tune_run.tune(
            Place("cpu", 5, "", 1), works, ranks, lambda f: (told.append(f), found.extend(f)),
            lambda done, total: None,
        )  # fmt: skip
        assert (left, len(told)) == (0, 1)
        return found

    first, second = on_ranks(2, tuned)
    assert first == second
    assert first[0].bad == (("cpu", "off by nan"),)
    assert first[0].sizes == ()


def test_several_workers_check_and_what_needs_more_memory_is_checked_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[tuple[str, int | None, bool]] = []

    class Crowded(Bench):
        def problem(self, work: Work, candidate: str) -> str:
            shared.append((candidate, *bounds[-1]))
            if candidate == "native" and bounds[-1][1]:
                raise NoRoomError("OutOfMemoryError: too little")
            return super().problem(work, candidate)

    bounds: list[tuple[int | None, bool]] = []
    in_this_process = here()

    def noting(do: Any, common: Any, shares: Any, *told: Any) -> None:
        bounds.append(common[1:])
        in_this_process(do, (common[0], None, common[2]), shares, *told)

    monkeypatch.setattr(tune_run, "in_processes", noting)
    monkeypatch.setattr(tune_run, "Bench", Crowded)
    monkeypatch.setattr(tune, "_LEAST_ROUNDS", 1)
    works = [work("cpu", "native", rows=(1,)), work("cpu", rows=(2,))]
    found: list[Finding] = []
    steps: list[tuple[int, int]] = []
    left = tune_run.tune(
        Place("cpu", 5, "", 1), works, Solo(), found.extend, lambda *step: steps.append(step),
        workers=Workers(2, 1000),
    )  # fmt: skip
    assert (left, steps) == (0, [(done, 5) for done in range(1, 6)])
    assert bounds == [(500, True), (1000, False)]
    assert shared == [
        ("cpu", 500, True), ("native", 500, True), ("cpu", 500, True), ("native", 1000, False),
    ]  # fmt: skip
    assert [set(one.sizes[0].seconds) for one in found] == [{"cpu", "native"}, {"cpu"}]


def test_a_group_of_one_rank_talks_to_itself() -> None:
    assert Solo().gather(3) == [3]
    assert Solo().broadcast("x") == "x"


# ---- the verb ----

SMALL = ("kernels", "tune", "--part", "experts", "--device", "cpu", "--decode-batches", "1", "4",
         "--prefill-rows", "20", "--seed", "3")  # fmt: skip
EXPERTS = {"moe.route_hash", "moe.route_learned", "moe.swiglu", "moe.experts"}


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where records are kept; pieces run in this process, and sources do not change meanwhile."""
    monkeypatch.setattr("metainfer.plan.tuning.default_cache", lambda: tmp_path / "tune")
    monkeypatch.setattr(verify_record, "source_hash", lambda: "abc")
    monkeypatch.setattr(tune_run, "in_processes", here())
    monkeypatch.setattr(tune, "_ROUNDS_S", 0.002)
    return tmp_path / "tune"


def test_the_verb_tunes_what_layers_bind_and_engines_bind_by_it(
    at_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = at_home / "out" / "record.json"
    ran = metainfer(*SMALL, "--json", "--out", str(out))
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert json.loads(out.read_text()) == record
    assert {entry["op"] for entry in record["entries"]} == EXPERTS
    for entry in record["entries"]:
        assert entry["bad"] == {}
        assert [size["rows"] for size in entry["sizes"]] == [1, 4, 20]
        assert all(set(size["seconds"]) == {"native", "cpu"} for size in entry["sizes"])

    broken = at_home / "broken.json"
    broken.write_text("{")
    with caplog.at_level(logging.WARNING, "metainfer.llm.engine"):
        loaded = load_model(model_dir(None), EngineSettings(device="cpu"))
    assert f"{broken} is ignored: the file is not a JSON record" in caplog.text
    assert loaded.plan.tuned_kernels.reason.startswith("4 operations were tuned on this card")
    whys = {kernel.op: kernel.why for kernel in loaded.kernels}
    assert all(whys[op].startswith("tuned: ") for op in EXPERTS)
    assert whys["hc.mix"] == f"default order: {NOT_TUNED}"

    terminal = Terminal(io.StringIO(), io.StringIO(), colour=False, live=False)
    say_kernels(terminal, loaded.kernels)
    assert f"default order: {NOT_TUNED}" in terminal.err.getvalue()
    assert " tuned: " in terminal.err.getvalue()

    switch = tuned_kernels(EngineSettings(tuned_kernels=False), Tuning(4, "they were tuned"))
    without = replace(loaded.plan, tuned_kernels=switch)
    kernel = loaded.kernels[0]
    registry = builtin_registry().with_tuned(known_here().bound(without, CPU))
    bound = registry.bind(kernel.op, kernel.case, CPU)
    assert bound.why == "default order: given with --no-tuned-kernels"


def known_here() -> Found:
    return find(tune_record.tune_facts(probe(), "cpu"))


def test_the_table_says_what_runs_and_what_never_will(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Bench.problem
    monkeypatch.setattr(
        Bench,
        "problem",
        lambda self, work, name: "off by nan" if name == "native" else right(self, work, name),
    )
    ran = metainfer(*SMALL)
    assert ran.code == 0, ran.err
    assert "NEVER BOUND moe.swiglu i128, native: off by nan" in ran.out
    explained = metainfer(
        "kernels", "explain", "moe.swiglu", "--model", "pebble", "--target", "cpu", "--json"
    )
    told = [one for one in json.loads(explained.out) if one["why"].startswith("tuned: ")]
    assert told
    for one in told:
        assert one["runs_on"] == "cpu"
        verdicts = {verdict["backend"]: verdict for verdict in one["verdicts"]}
        assert verdicts["native"]["reason"] == "known bad on this card: off by nan"


def test_interrupted_tuning_keeps_what_is_done(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_run, "in_processes", here(stop_after=7))
    with pytest.raises(KeyboardInterrupt):
        metainfer(*SMALL)
    assert known_here().tuning().operations == 2  # of three pieces each: two checks, the times


def test_times_that_cannot_be_kept_are_told_all_the_same(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home.write_text("a file where a directory should be")
    ran = metainfer(*SMALL)
    assert ran.code == 0, ran.err
    assert "moe.swiglu i128" in ran.out
    assert ran.err.count("times are not kept where serve looks for them: ") == 1


def test_a_run_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("metainfer.plan.tuning.default_cache", lambda: tmp_path)
    ran = metainfer(
        "kernels", "tune", "--part", "sampling", "--device", "cpu", "--decode-batches", "1"
    )
    assert ran.code == 0, ran.err
    assert "sample.draw" in ran.out
    ran = metainfer(*SMALL, "--budget", "1e-6")
    assert ran.code == 3
    assert "4 of 4 operations were not reached; run it again" in ran.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--plan", "plan.json"), "a plan does not name its model"),
        (("--decode-batches", "0"), "--decode-batches must be at least 1"),
        (("--out", "."), "is a directory"),
        (("pebble", "--plan", "no-such.json"), "no such file"),
        (("pebble", "--plan", "README.md"), "README.md: the plan is not a JSON plan record"),
        (("--budget", "0"), "is not a number above 0"),
        (("--out", "/proc/record.json"), "--out"),
    ],
)
def test_what_cannot_be_tuned_is_refused(flags: tuple[str, ...], sentence: str) -> None:
    ran = metainfer("kernels", "tune", *flags)
    assert ran.code != 0
    assert sentence in ran.err


def test_a_plan_gives_formats_order_and_layout(at_home: Path, tmp_path: Path) -> None:
    plan = load_model(
        model_dir(None),
        EngineSettings(device="cpu", dtype="float32", kernel_order="*=cpu,reference", threads=1),
    ).plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    ran = metainfer(
        "kernels", "tune", "pebble", "--plan", str(tmp_path / "plan.json"), "--part", "products",
        "--decode-batches", "2", "--prefill-rows", "2", "--json", "--device", "cpu",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for entry in json.loads(ran.out)["entries"]:
        assert entry["case"]["dtype"] == "float32"
        assert (entry["caches"], entry["threads"]) == ("float32", 1)
        assert set(entry["sizes"][0]["seconds"]) == {"cpu"}
