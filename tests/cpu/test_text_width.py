"""No line of what verbs print is wider than a page, whatever the record that it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from metainfer.bench import ops_report, profile_report, quality_run
from metainfer.bench.record import WIDTH, prose, table
from metainfer.cli import weights_check
from metainfer.cli.verify import report as verify_text
from metainfer.ops.base import case_fields
from metainfer.ops.catalogue import OPS
from metainfer.weights.check import CheckReport, Problem
from tests.fakes.command import metainfer

RECORDS = Path(__file__).parents[2] / "docs" / "benchmarks"
LONG = "numbers differ from those of the reference by more than they may, in many rows of many"


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def cases() -> list[tuple[str, Any]]:
    """Of every operation, the case with the longest name."""
    found = []
    for op in OPS.values():
        fields = [case_fields(case) for some in op.cases.values() for case in some]
        found.append((op.name, max(fields, key=lambda one: len(ops_report.short_case(one)))))
    return found


def test_bench_ops() -> None:
    made = json.loads((RECORDS / "gpu-kernels.json").read_text(encoding="utf-8"))
    text = ops_report.text_report(made)
    assert widest(text) <= WIDTH
    assert "FlashMLA 526" in text and "RTX" in text


def test_verify() -> None:
    plain = {"phase": "prefill", "rows": 8192, "tokens": 1048576, "backend": "triton",
             "tolerance": 0.02, "seconds": 0.123456, "floor_s": 0.0123}  # fmt: skip
    told = [
        {"op": op, "case": case, **plain, "state": "failed", "error": 3.25e-1, "problem": LONG}
        for op, case in cases()
    ]
    record = {
        "cases": told, "passed": 0, "failed": len(told), "not_run": 3, "not_verified": 2,
        "partial": [LONG + " " + LONG], "sha256": "0" * 64,
        "card": {"name": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
                 "code_for": "sm_89"},
        "rates": {"launch_s": 2e-6, "bytes_per_s": 4.2e12,
                  "flops_per_s": {"float32": 5e13, "bfloat16": 7e14, "fp8": 1.2e15}},
    }  # fmt: skip
    text = verify_text(record)
    assert widest(text) <= WIDTH and text.count("FAILED attention.") >= 5


def test_profile() -> None:
    ops = [
        {"op": op, "case": case, "backend": "triton", "rows": 131072, "calls": 86,
         "seconds": 0.123, "low_s": 0.1, "high_s": 0.2, "floor_s": 0.0123, "bound": "operations"}
        for op, case in cases()
    ]  # fmt: skip
    step = {"phase": "prefill", "rows": 131072, "tokens": 1048576, "step_s": 12.3, "ops_s": 6.1,
            "floor_s": 1.2, "ops": ops}  # fmt: skip
    made = {"model": "deepseek-v4.1-flash", "arch": {"layers": 43}, "how": LONG, "steps": [step]}
    assert widest(profile_report.text_report(made)) <= WIDTH


def test_bench_quality() -> None:
    found = {"perplexity_a": 12.5, "perplexity_b": 12.6, "perplexity_rise": 0.008, "kl": 0.01,
             "kl_p99": 0.2, "top1": 0.98, "tokens": 123456, "told": 0.999}  # fmt: skip
    made = {
        "divergence": found, "needles": {"count": 40, "recall_a": 0.9, "recall_b": 0.8},
        "verdict": {"passed": False, "failed": [LONG, LONG]}, "source": LONG, "windows": 64,
        "load": {"answers": 64}, "equal_leading_greedy_tokens": [64] * 64,
        "a": "tuned," + " ".join(["--dtype=float32"] * 12), "b": "tuned",
    }  # fmt: skip
    text = quality_run.text_report(made)
    assert widest(text) <= WIDTH and "perplexity" in text


def test_weights_check(tmp_path: Path) -> None:
    bad = Problem("shape", f"layers.0.attn.wq_a.weight: {LONG}")
    report = CheckReport(str(tmp_path), None, 163, 48000, 10**11, (), (bad, bad), deep=True)
    assert widest(weights_check._verdict(report)) <= WIDTH
    ran = metainfer("weights", "check")
    assert ran.code == 0 and widest(ran.out) <= WIDTH


WORDS = st.lists(st.text("abc,-", min_size=1, max_size=20), max_size=12).map(" ".join)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=6))
def test_tables_fit_and_lose_nothing(rows: list[tuple[str, str, str, str]]) -> None:
    text = table(["one", "two", "three", "four"], rows)
    assert widest(text) <= WIDTH
    letters = sorted("".join("".join(row).split()) for row in rows)
    body = text.split("\n", 2)[2] if text.count("\n") > 1 else ""
    assert sorted("".join(body.split())) == sorted("".join(letters))


def test_narrow_tables_stay_as_they_are_and_words_stay_whole() -> None:
    assert table(["a", "b"], [("x y", "1")]) == "a    b\n---  -\nx y  1"
    path = "/a" * 80
    assert path in prose(f"wrote {path}").split() and path in table(["a", "b"], [(path, "1")])
