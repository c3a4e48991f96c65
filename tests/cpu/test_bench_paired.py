"""`bench paired`: the statistics against known values, and a run of two engines."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from metainfer.arch.tiny import tiny_arch, tiny_config
from metainfer.bench.paired import record, text_report
from metainfer.bench.paired_settings import A, B, PairedLoad
from metainfer.bench.plot_paired import draw_paired
from metainfer.bench.stages import SideRun, StagesRun
from metainfer.bench.statistics_paired import (
    incomplete_beta,
    paired_effect,
    t_probability,
    t_quantile,
)
from metainfer.core.errors import UserError
from tests.fakes.command import metainfer

MACHINE = {"cpu": {"model": "Some Processor", "physical_cores": 2}, "gpus": [{"name": "A GPU"}]}


def test_students_t_is_that_of_the_tables() -> None:
    for freedom, expected in (
        (1, 12.7062),
        (4, 2.7764),
        (10, 2.2281),
        (34, 2.0322),
        (1000, 1.9623),
    ):
        assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-4)
    assert t_probability(2.0, 10) == pytest.approx(0.963306, abs=1e-6)
    assert t_probability(-2.0, 10) == pytest.approx(1 - 0.963306, abs=1e-6)
    assert t_probability(0.0, 3) == pytest.approx(0.5)
    assert t_probability(math.inf, 3) == 1.0
    assert incomplete_beta(0.5, 2, 3) == pytest.approx(0.6875)
    assert (incomplete_beta(0.0, 2, 3), incomplete_beta(1.0, 2, 3)) == (0.0, 1.0)


def test_the_effect_has_an_interval_and_a_test() -> None:
    effect = paired_effect([1.0, 1.1, 0.9, 1.0], [1.1, 1.2, 1.05, 1.08])
    assert effect.mean == pytest.approx(0.108889, abs=1e-6)
    assert effect.low == pytest.approx(0.04935, abs=1e-5)
    assert effect.high == pytest.approx(0.17181, abs=1e-5)
    assert effect.t == pytest.approx(5.9602, abs=1e-4)
    assert effect.p_t == pytest.approx(0.009448, abs=1e-6)
    assert (effect.wins, effect.pairs) == (4, 4)
    sure = paired_effect([1.0, 1.0001] * 18, [2.0, 2.0004] * 18)
    assert 0.0 < sure.p_t < 1e-100  # of 1 minus a probability nothing would be left
    same = paired_effect([2.0, 2.0], [2.0, 2.0])
    assert (same.mean, same.t, same.p_t) == (0.0, 0.0, pytest.approx(1.0))


def test_names_exchanged_turn_the_effect_round() -> None:
    a, b = [1.0, 1.1, 0.9, 1.0], [1.1, 1.0, 1.05, 0.88]
    one, other = paired_effect(a, b), paired_effect(b, a)
    assert 1.0 + other.mean == pytest.approx(1.0 / (1.0 + one.mean))
    assert 1.0 + other.low == pytest.approx(1.0 / (1.0 + one.high))
    assert (other.t, other.p_t) == (pytest.approx(-one.t), pytest.approx(one.p_t))
    assert paired_effect([1.0, 2.0], [2.0, 1.0]).mean == pytest.approx(0.0)  # b/a - 1: 25 %


def run(pairs: int, rounds: int, missing: dict[str, str] | None = None) -> StagesRun:
    """B takes a tenth less time than A; the last pair may lack its second turn."""
    turns = [
        {"tokens": 100, "cached_tokens": 0, "seconds": 1.0 + 0.01 * (n % 5)} for n in range(pairs)
    ]
    faster = [
        {"tokens": 100, "cached_tokens": 0, "seconds": 0.9 * turn["seconds"] + 0.002 * (n % 3)}
        for n, turn in enumerate(turns)
    ]
    sides = {
        A: SideRun({"dtype": "float32"}, {"prefill 1024": turns, "decode batch 1": turns}),
        B: SideRun(
            {"dtype": "float32"},
            {"prefill 1024": faster[:rounds], "decode batch 1": turns[:rounds]},
            missing or {},
        ),
    }
    for side in sides.values():
        side.counted = {"prompt_tokens": 5, "cached_tokens": 0}
    return StagesRun("together", sides, rounds)


def test_the_record_tells_the_effect_of_each_work() -> None:
    load = PairedLoad(a="adapted", b="tuned", pairs=12)
    made = record(run(12, 11), load, "tiny", tiny_arch(), MACHINE)
    prefill, decode = made["works"]
    assert prefill["effect"]["pairs"] == len(prefill["effects"]) == 11
    assert prefill["effect"]["low"] > 0.10
    assert prefill["effect"]["high"] < 0.1112
    assert prefill["effect"]["p_t"] < 1e-6
    assert decode["effect"]["mean"] == 0.0
    assert (made["kind"], made["a"], made["b"]) == ("paired", "adapted", "tuned")
    text = text_report(made)
    assert "11 pairs, interleaved, order alternating" in text
    assert "11/11" in text
    ids = {element.get("id", "") for element in ET.fromstring(draw_paired(made)).iter()}
    assert {"pairs-0", "mean-1", "interval-1"} <= ids


def test_work_that_a_cache_served_is_marked() -> None:
    measured = run(3, 3)
    turns = [dict(turn) for turn in measured.sides[B].turns["prefill 1024"]]
    turns[1]["cached_tokens"] = 128
    measured.sides[B].turns["prefill 1024"] = turns
    made = record(measured, PairedLoad(a="adapted", b="tuned"), "tiny", tiny_arch(), MACHINE)
    assert "NOT COLD: B, prefill 1024: 128 prompt tokens came from a cache" in text_report(made)


def test_a_cache_that_serves_costs_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = run(3, 3)
    measured.sides[A].turns["decode batch 1"][0]["cached_tokens"] = 1
    monkeypatch.setattr("metainfer.bench.stages.measure", lambda *_: measured)
    ran = metainfer("bench", "paired", "--device", "cpu", "--a", "adapted", "--b", "tuned")
    assert (ran.code, "NOT COLD: A, decode batch 1" in ran.out) == (1, True), ran.err


def test_work_that_one_setting_cannot_do_does_not_cost_the_rest() -> None:
    measured = run(3, 3, {"prefill 1024": "no room"})
    made = record(measured, PairedLoad(a="adapted", b="tuned"), "tiny", tiny_arch(), MACHINE)
    assert [work["name"] for work in made["works"]] == ["decode batch 1"]
    assert "B failed at prefill 1024: no room" in text_report(made)


def test_what_gives_no_effect_is_refused() -> None:
    load = PairedLoad(a="adapted", b="tuned")
    with pytest.raises(UserError, match="time for 1 pairs"):
        record(run(2, 1), load, "tiny", tiny_arch(), MACHINE)
    both = {"prefill 1024": "no room", "decode batch 1": "no room"}
    with pytest.raises(UserError, match="B failed at prefill 1024: no room"):
        record(run(3, 3, both), load, "tiny", tiny_arch(), MACHINE)
    with pytest.raises(UserError, match="--pairs must be at least 2"):
        PairedLoad(a="tuned", b="tuned", pairs=1)
    ran = metainfer("bench", "paired", "--a", "tuned")
    assert (ran.code, "--b is not given" in ran.err) == (2, True)


def test_the_verb_pairs_two_engines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    ran = metainfer(
        "bench", "paired", str(tmp_path), "--load-format", "dummy", "--device", "cpu",
        "--threads", "1", "--a", "generic", "--b", "tuned,--max-num-seqs=3", "--pairs", "2",
        "--input-lens", "24", "--decode-batches", "2", "--decode-context", "12",
        "--decode-len", "3", "--engines", "in-turns", "--save-result", "--result-dir",
        str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "2 pairs, interleaved, order alternating, each turn in a process of its own" in ran.out
    made = json.loads((tmp_path / "bench-paired.json").read_text())
    assert [work["effect"]["pairs"] for work in made["works"]] == [2, 2]
    assert made["sides"]["B"]["receipt"]["settings"]["max_num_seqs"] == 3
    assert made["sides"]["A"]["receipt"]["kernels"]["moe.experts"] == {"composed": 5}
    assert (tmp_path / "bench-paired.svg").is_file()
