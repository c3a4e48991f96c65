"""What `bench serve` makes of its settings, its prompts and its outcomes, without a server."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench import record as record_module
from metainfer.bench.http_stream import Outcome
from metainfer.bench.record import commit, table, write_json
from metainfer.bench.serve import Measured, Run
from metainfer.bench.serve_report import meets, percentile, record, summary, text_report
from metainfer.bench.serve_settings import (
    ServeLoad,
    ServeResults,
    parse_goal,
    parse_metrics,
    parse_percentiles,
)
from metainfer.bench.workload import (
    Calibration,
    RandomWords,
    TextPassages,
    arrival_times_s,
    make_asks,
)
from metainfer.core.errors import UserError


def test_arrivals_have_the_rate_and_the_shape() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = list(islice(arrival_times_s(3, 10.0, burstiness), 20_000))
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert mean == pytest.approx(0.1, rel=0.05)
        assert variance == pytest.approx(0.01 / burstiness, rel=0.1)
    assert list(islice(arrival_times_s(3, math.inf, 1.0), 3)) == [0.0, 0.0, 0.0]


def test_text_passages_never_overlap_and_end_in_an_error(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{n}" for n in range(100)), encoding="utf-8")
    source = TextPassages(path, seed=3)
    words = [word for _ in range(10) for word in source.passage(10).split()]
    assert sorted(words) == sorted(f"w{n}" for n in range(100))
    with pytest.raises(UserError, match="too few for prompts without repeats"):
        source.passage(1)


def test_a_dataset_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        TextPassages(path, seed=0)
    path.write_bytes(b" \n")
    with pytest.raises(UserError, match="holds no words"):
        TextPassages(path, seed=0)


def test_calibration_solves_for_words() -> None:
    calibration = Calibration.through((16, 53), (144, 437))
    assert calibration == Calibration(5.0, 3.0)
    asks = make_asks(RandomWords(1), calibration, 7, 50, (305, 10), 0.2)
    counts = [5 + 3 * len(ask.prompt.split()) for ask in asks]
    assert all(305 * 0.8 - 3 <= count <= 305 * 1.2 + 3 for count in counts)
    assert len(set(counts)) > 10
    assert calibration.words_for(1) == 1


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "error": "",
        "started_s": 0.0,
        "latency_s": 1.0,
        "ttft_s": 0.2,
        "gaps_s": (0.4, 0.4),
        "prompt_tokens": 10,
        "output_tokens": 3,
    }
    return Outcome(**(values | changes))


def test_time_per_output_token_leaves_out_the_first() -> None:
    assert outcome().tpot_s == pytest.approx(0.4)
    assert outcome(output_tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (25, 1.75), (50, 2.5), (99, 3.97), (100, 4.0)]
)
def test_percentiles_are_linear_between_ranks(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)
    assert percentile([7.0], percent) == 7.0


def test_goodput_counts_what_kept_every_bound() -> None:
    goals = (parse_goal("ttft:300"), parse_goal("tpot:500"))
    assert meets(outcome(), goals)
    assert not meets(outcome(ttft_s=0.31), goals)
    assert not meets(outcome(latency_s=1.3), goals)
    run = Run((outcome(), outcome(ttft_s=0.31)), 2.0, False)
    assert summary(run, ServeResults(goodput=goals))["request_goodput"] == 0.5


def test_the_record_is_json_with_vllms_keys_and_where_it_comes_from() -> None:
    runs = tuple(Run((outcome(),), duration_s, False) for duration_s in (1.0, 4.0, 2.0))
    measured = Measured("pebble", 5, runs)
    results = ServeResults(save_detailed=True, goodput=(("ttft", 500.0),))
    made = record(measured, ServeLoad(), results, {"cpu": "one"})
    again = json.loads(json.dumps(made, allow_nan=False))
    wanted = (
        "duration completed failed total_input_tokens total_output_tokens request_throughput"
        " request_goodput output_throughput total_token_throughput mean_ttft_ms median_ttft_ms"
        " std_ttft_ms p99_ttft_ms mean_tpot_ms mean_itl_ms mean_e2el_ms"
        " date command commit versions machine repeats seed"
    )
    assert set(wanted.split()) <= set(again)
    assert again["duration"] == 2.0  # the run of median throughput
    assert again["spread"]["total_token_throughput"] == [13 / 4, 13.0]
    assert again["request_rate"] == "inf"
    assert len(again["runs"][0]["requests"]) == 1
    text = text_report(made, results)
    assert "13 tokens" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_run_without_any_success_has_no_distribution() -> None:
    made = record(
        Measured("m", 0, (Run((outcome(error="refused"),), 1.0, True),)),
        ServeLoad(), ServeResults(), {},
    )  # fmt: skip
    assert made["completed"] == 0
    assert "mean_ttft_ms" not in made
    assert "failed: refused" in text_report(made, ServeResults())


def test_values_of_flags() -> None:
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    for parse, text in (
        (parse_metrics, "ttft,speed"),
        (parse_percentiles, "101"),
        (parse_goal, "itl:3"),
    ):
        with pytest.raises(UserError):
            parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompts": 0}, {"request_rate": 0.0}, {"max_concurrency": 0}, {"burstiness": 0.0},
        {"random_range_ratio": 1.0}, {"dataset_name": "text"}, {"repeats": 0},
        {"dataset_path": Path("x")}, {"random_input_len": 0}, {"random_output_len": 0},
    ],
)  # fmt: skip
def test_loads_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ServeLoad(**changes)


def test_records_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_tables_are_aligned() -> None:
    assert table(["name", "ms"], [["a", "1.0"], ["longer", "12.5"]]).splitlines() == [
        "name      ms",
        "------  ----",
        "a        1.0",
        "longer  12.5",
    ]


def test_the_commit_is_a_hash_or_unknown() -> None:
    name = commit().rstrip("+")
    assert name == "unknown" or len(name) == 40


def test_outside_of_a_checkout_the_environment_may_tell_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "__file__", str(tmp_path / "metainfer" / "bench" / "x.py"))
    monkeypatch.delenv("METAINFER_COMMIT", raising=False)
    assert commit() == "unknown"
    monkeypatch.setenv("METAINFER_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
