"""`bench ops` on the CPU: sides take turns on the same work, and the record says what it must."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench import ops_run
from metainfer.bench.cards import CARDS, projected_s
from metainfer.bench.ops import NOTHING, OpWork, difference, measure
from metainfer.bench.ops_generic import generic_side
from metainfer.bench.ops_peers import _grouped_mm
from metainfer.bench.ops_report import GENERIC, text_report
from metainfer.bench.ops_run import run_ops, sides
from metainfer.bench.ops_settings import OpsLoad
from metainfer.bench.ops_works import works_of
from metainfer.kernels.compare import tensors
from metainfer.kernels.inputs.series import draw_one, draw_series
from metainfer.kernels.platform import platform
from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.timing import Stopwatch
from metainfer.ops.base import Cost, Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates, operands_of
from metainfer.ops.uses import uses_of
from tests.fakes.command import metainfer

QUICK = OpsLoad(rounds=2, prefill_rows=16, context=64, decode_batches=(2,), device="cpu")
RATES = Rates(2e9, {"float32": 1e9, "bfloat16": 4e9}, 1e-6)


def quietly(*_: object) -> None:
    pass


def test_what_the_time_does_not_reach_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(*arguments: Any, **_: Any) -> None:
        _, _, ((first, *_), *_), _, failed = arguments[:5]
        failed(first[0], "it broke")

    monkeypatch.setattr(ops_run, "in_processes", first_alone)
    said: list[str] = []
    run_ops(replace(QUICK, ops="norm.rms_norm", budget_s=1.0), quietly, said.append)
    count = int(said[0].split()[0])
    assert count > 1
    left = f"{count - 1} of {count} operations were not reached: give a longer --budget"
    assert said[1:] == [left]


def test_all_sides_of_an_operation_take_turns_and_agree() -> None:
    made = run_ops(replace(QUICK, ops="norm.rms_norm"), quietly, quietly)
    assert {entry["rows"] for entry in made["operations"]} == {16, 2}
    for entry in made["operations"]:
        assert {"native", "cpu", GENERIC} <= set(entry["sides"])
        assert entry["missing"] == {}
        assert entry["served"]
        for name, side in entry["sides"].items():
            assert len(side["seconds"]) == 2
            assert side["low_s"] <= side["median_s"] <= side["high_s"]
            assert side["of_floor"] == pytest.approx(entry["floor_s"] / side["median_s"])
            assert name == "native" or side["difference"] < 0.02
    text = text_report(made)
    assert "norm.rms_norm w256" in text
    assert "a pass of decode, 2 rows, spends" in text
    assert json.loads(json.dumps(made))["operations"] == made["operations"]


def test_inputs_for_which_memory_does_not_suffice_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops_run, "_most_bytes", lambda device: 2 * 10**9)
    made = run_ops(replace(QUICK, ops="norm.rms_norm", prefill_rows=10**7), quietly, quietly)
    missing = {entry["rows"]: entry["missing"] for entry in made["operations"]}
    assert missing[2] == {}
    assert "t allocate memory" in missing[10**7][NOTHING]


@pytest.mark.parametrize("op", sorted({use.op for use in uses_of("pebble", 1)}))
def test_the_generic_path_computes_what_the_kernels_compute(op: str) -> None:
    load = replace(QUICK, ops=op, rounds=1, decode_batches=(3,))
    here = platform("cpu")
    works = works_of(load, "cpu")
    assert works
    for work in works:
        results = []
        for name, side in sides(work, load, here, None, {}).items():
            assert not isinstance(side, str) or name == NOTHING
            if not isinstance(side, str):
                call = draw_one(work.op, work.case, work.load, "cpu", 0)
                results.append(tensors(side(work.case, call)()))
        assert results
        assert all(difference(results[-1], other) < 0.03 for other in results)


ROWS_IN_CODES = ("linear.fp8_rows", "linear.grouped_fp8_rows", "moe.experts_fp8_rows")


def test_on_a_gpu_products_are_measured_as_layers_bind_them_there() -> None:
    load = OpsLoad(models=("deepseek-v4-flash",))
    on_gpu, on_cpu = ({w.op for w in works_of(load, device)} for device in ("cuda", "cpu"))
    plain = {"linear.fp8_block", "linear.grouped", "moe.experts"}
    assert on_gpu >= set(ROWS_IN_CODES)
    assert on_gpu.isdisjoint(plain)
    assert on_cpu >= plain
    assert on_cpu.isdisjoint(ROWS_IN_CODES)


@pytest.mark.parametrize("op", ROWS_IN_CODES)
def test_the_generic_path_takes_rows_in_codes(op: str) -> None:
    (reference,) = (backend for backend in REFERENCES if backend.op == op)
    sides = [generic_side(op)]
    for case in OPS[op].small_cases:
        call = draw_one(op, case, Load(5, 64), "cpu", 0)
        expected = tensors(reference.run(case, call.weights, *call.arguments))
        torch_products = _grouped_mm(OpWork("some", 1, op, case, "prefill", Load(5)))
        assert (torch_products is None) == (op != "moe.experts_fp8_rows")
        for side in (*sides, *filter(None, [torch_products])):
            # The activation inside of experts is not rounded to codes.
            assert difference(expected, tensors(side(case, call)())) < 0.1


def test_a_side_that_fails_is_named_and_costs_no_other() -> None:
    case = OPS["moe.swiglu"].small_cases[0]
    work = OpWork("some", 1, "moe.swiglu", case, "decode", Load(3))

    def broken(case: object, call: object) -> object:
        raise RuntimeError("no such instruction")

    def fine(case: object, call: object) -> object:
        return lambda: None

    sides = {"broken": broken, "fine": fine, "absent": "not written"}
    result = measure(work, sides, Stopwatch("cpu"), 2)  # type: ignore[arg-type]
    assert result.missing == {
        "broken": "RuntimeError: no such instruction",
        "absent": "not written",
    }
    assert list(result.seconds) == ["fine"]


def test_inputs_that_do_not_fit_are_said() -> None:
    case = OPS["moe.swiglu"].small_cases[0]
    work = OpWork("some", 1, "moe.swiglu", case, "decode", Load(10**15))
    result = measure(work, {}, Stopwatch("cpu"), 2)
    assert (list(result.missing), result.seconds) == ([NOTHING], {})
    assert result.missing[NOTHING].startswith("no inputs: RuntimeError: ")


def test_a_series_exceeds_the_caches_or_has_its_most_copies() -> None:
    case = OPS["moe.swiglu"].cases["pebble"][0]
    calls = draw_series("moe.swiglu", case, Load(2), "cpu", 0)
    assert len(calls) == 16
    numbers = {float(call.arguments[0].float().sum()) for call in calls}
    assert len(numbers) == 16


def test_floors_are_the_longer_of_moving_and_computing() -> None:
    assert RATES.floor_s(Cost(8e9, 2e9), "bfloat16") == 2.0
    assert RATES.bound(Cost(8e9, 2e9), "bfloat16") == "operations"
    assert RATES.floor_s(Cost(1e9, 6e9), "bfloat16") == 3.0
    assert RATES.bound(Cost(1e9, 6e9), "bfloat16") == "bytes"
    assert RATES.bound(Cost(1.0, 1.0), "bfloat16") == "launch"
    assert RATES.product_rate("fp8") == 4e9
    assert operands_of(OPS["norm.rms_norm"].cases["pebble"][0]) == "bfloat16"


def test_times_are_projected_by_the_fraction_of_the_floor() -> None:
    (l40s,) = (card for card in CARDS if card.name == "L40S")
    assert projected_s(l40s, Cost(285e12, 0), "bfloat16", 0.5) == pytest.approx(2.0)
    assert projected_s(l40s, Cost(0, 0.864e12 * 0.9), "float32", 1.0) == pytest.approx(1.0)


def test_the_verb_writes_its_record(tmp_path: Path) -> None:
    ran = metainfer(
        "bench", "ops", "--ops", "moe.swiglu", "--rounds", "1", "--prefill-rows", "8",
        "--save-result", "--result-dir", str(tmp_path), "--device", "cpu",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "pebble, one rank of 1" in ran.out
    record = json.loads((tmp_path / "bench-ops.json").read_text())
    assert record["rates"]["bytes_per_s"] > 0
    assert {entry["op"] for entry in record["operations"]} == {"moe.swiglu"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--as", "sm_89", "--device", "cpu"), "a CPU does not run the code of sm_89"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--decode-batches", "4", "0"), "--decode-batches must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: tuple[str, ...], message: str) -> None:
    ran = metainfer("bench", "ops", *flags)
    assert ran.code == 2
    assert message in ran.err
