"""Records of tuning count where they were made, and say why they do not elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metainfer.kernels import tune_record
from metainfer.kernels.tune import TimedRows
from metainfer.kernels.tune_record import Conditions, Found, differences, find, keep
from metainfer.kernels.tune_run import Finding
from metainfer.kernels.tuned import NOT_TUNED, Timing, key_of
from metainfer.ops.base import Target
from metainfer.ops.norm import RmsNormCase

OP = "norm.rms_norm"
CASE = RmsNormCase(64)
CPU = Target("cpu")
CARD = {
    "device": "cuda", "code_for": None, "name": "Some Card", "capability": [12, 0],
    "multiprocessors": 132, "memory_bytes": 10**11, "driver": "580.1", "torch": "2.13",
    "triton": "3.6", "kernels": "abc", "isa": None,
}  # fmt: skip
CONDITIONS = Conditions("bfloat16", 0)


def timed(rows: int, **seconds: float) -> TimedRows:
    return TimedRows(rows, (2048,), "graph", seconds)


def finding(*sizes: TimedRows, case: Any = CASE, **bad: str) -> Finding:
    return Finding(OP, case, sizes, tuple(bad.items()))


def kept(cache: Path, *findings: Finding, **facts: Any) -> Path:
    return keep({**CARD, **facts}, CONDITIONS, findings, {"date": "2026-01-01"}, cache)


def test_a_record_counts_where_all_that_decides_is_equal(tmp_path: Path) -> None:
    kept(tmp_path, finding(timed(8, a=1.0), timed(1, a=2.0), b="off"))
    found = find({**CARD, "name": "Another Name", "memory_bytes": 1}, tmp_path)
    tuned = found.tuned(CPU, CONDITIONS)
    measured = tuned.measured[key_of(OP, CASE)]
    assert measured.timings == (Timing(1, {"a": 2.0}), Timing(8, {"a": 1.0}))
    assert measured.bad == {"b": "off"}
    assert found.tuning().operations == 1
    assert found.tuning().reason.startswith("1 operation was tuned on this card, the last on 20")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"multiprocessors": 188}, "tuned for 132 SMs, this card has 188"),
        ({"capability": [9, 0]}, "tuned on sm_120, this card is sm_90"),
        ({"driver": "590"}, "tuned with driver 580.1, this is 590"),
        ({"torch": "2.14", "triton": None},
         "tuned with torch 2.13, this is 2.14, tuned with triton 3.6, this is none"),
        ({"kernels": "xyz"}, "tuned with kernels of other sources"),
    ],
)  # fmt: skip
def test_a_record_of_another_card_does_not_count_and_says_why(
    tmp_path: Path, facts: dict[str, Any], why: str
) -> None:
    # The same name all along: it decides nothing.
    kept(tmp_path, finding(timed(1, a=1.0)))
    found = find({**CARD, **facts}, tmp_path)
    tuned = found.tuned(CPU, CONDITIONS)
    assert not tuned.measured
    assert tuned.why_not(OP, CASE, CPU) == f"default order: {why}"
    assert tuned.why_not(OP, RmsNormCase(9), CPU) == f"default order: {NOT_TUNED}"
    assert found.tuning().operations == 0
    assert found.tuning().reason == why


def test_records_of_other_devices_are_not_worth_a_word(tmp_path: Path) -> None:
    kept(tmp_path, finding(timed(1, a=1.0)))
    assert find({**CARD, "device": "cpu"}, tmp_path) == Found()


def test_other_conditions_and_other_contracts_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path, finding(timed(1, a=1.0)))
    for conditions, why in (
        (Conditions("float32", 0), "tuned with caches in bfloat16, these are in float32"),
        (Conditions("bfloat16", 2), "tuned with 0 threads, these are 2"),
    ):
        tuned = find(CARD, tmp_path).tuned(CPU, conditions)
        assert not tuned.measured
        assert tuned.unused[key_of(OP, CASE)] == why
    record = json.loads(path.read_text())
    record["entries"][0]["op_version"] = 0
    path.write_text(json.dumps(tune_record.make_record(CARD, record["entries"], {})))
    tuned = find(CARD, tmp_path).tuned(CPU)
    assert tuned.unused[key_of(OP, CASE)] == "tuned for version 0 of its contract"


def test_what_is_tuned_again_is_replaced_the_rest_stays(tmp_path: Path) -> None:
    wide = RmsNormCase(128)
    kept(tmp_path, finding(timed(1, a=1.0)), finding(timed(1, a=1.0), case=wide))
    path = kept(tmp_path, finding(timed(1, a=5.0)))
    measured = find(CARD, tmp_path).tuned(CPU, CONDITIONS).measured
    assert measured[key_of(OP, CASE)].timings[0].seconds == {"a": 5.0}
    assert measured[key_of(OP, wide)].timings[0].seconds == {"a": 1.0}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", path.name]


@pytest.mark.parametrize("damage", ["{", "[]", '{"kind": "other"}', "edited"])
def test_a_broken_record_is_named_and_replaced_by_the_next(tmp_path: Path, damage: str) -> None:
    path = kept(tmp_path, finding(timed(1, a=1.0)))
    text = path.read_text()
    path.write_text(text.replace("1.0", "0.5") if damage == "edited" else damage)
    found = find(CARD, tmp_path)
    assert not found.entries
    (sentence,) = found.broken
    assert sentence.startswith(f"{path} is ignored: the ")
    assert sentence.endswith("`metainfer kernels tune` writes another")
    kept(tmp_path, finding(timed(1, a=2.0)))
    assert find(CARD, tmp_path).tuning().operations == 1


def test_differences_of_a_cpu_speak_of_cores() -> None:
    facts = {**CARD, "device": "cpu", "multiprocessors": 2, "isa": ["avx2"]}
    card = {**facts, "multiprocessors": 8, "isa": []}
    assert differences(card, facts) == [
        "tuned for 8 cores, this processor has 2",
        "tuned with nothing, this processor has avx2",
    ]
