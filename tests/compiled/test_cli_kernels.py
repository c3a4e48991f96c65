"""The verbs about kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metainfer.kernels import on_paper, verify_record
from metainfer.kernels.coverage_report import cards_that_ran
from metainfer.kernels.triton import compile_all
from metainfer.kernels.verify_record import KIND, RECORD_VERSION, sign, source_hash
from metainfer.ops import uses
from metainfer.ops.norm import RmsNormCase
from metainfer.ops.targets import CARD_KINDS
from metainfer.ops.use import DECODE, Use
from tests.fakes.command import Ran, metainfer

CASE = RmsNormCase(1024)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Caches of the test's own."""
    for module in (compile_all, verify_record):
        monkeypatch.setattr(module, "default_cache", lambda: tmp_path)
    monkeypatch.setattr("metainfer.kernels.verify_known.default_cache", lambda: tmp_path)
    yield tmp_path


def coverage(monkeypatch: pytest.MonkeyPatch, used: Use, *arguments: str) -> Ran:
    """`metainfer kernels coverage` of a model that runs one operation."""
    monkeypatch.setattr(uses, "uses_of", lambda *_, **__: (used,))
    return metainfer("kernels", "coverage", "--workers", "1", *arguments)


def record_of(card: dict[str, Any], problem: str = "") -> str:
    case = {"width": 1024, "eps": 1e-6, "dtype": "bfloat16"}
    entry = {"op": "norm.rms_norm", "case": case, "backend": "triton", "problem": problem}
    entry["state"] = "failed" if problem else "passed"
    entry |= {"phase": "decode", "rows": 1, "tokens": 2048, "tolerance": 0.01}
    entry |= dict.fromkeys(("error", "seconds", "floor_s"))
    counts = dict.fromkeys(("passed", "failed", "not_run", "not_verified"), 0)
    facts = {"kernels": source_hash(), "device": "cuda", "code_for": None, "name": "Some Card"}
    return json.dumps(
        sign(
            {
                "kind": KIND,
                "version": RECORD_VERSION,
                "date": "2026-01-01",
                "card": facts | card,
                "cache_dtype": "bfloat16",
                "rates": None,
                "whole_sizes": True,
                "partial": [],
                "cases": [entry],
                **counts,
            }
        )
    )


def test_coverage_as_text_and_as_json(monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    norm = Use("norm.rms_norm", CASE, (DECODE,), times=43)
    ran = coverage(monkeypatch, norm, "deepseek-v4-flash", "--tp", "8", "--target", "89")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "norm.rms_norm: width 1024 (43 times a pass)"
    assert lines[1].startswith("  decode: triton, 1 launch, no products, ")
    assert "compiled only" in lines[1]
    assert "deepseek-v4-flash, one of 8 ranks, on sm_89 (L40S; 99 KiB" in ran.out
    assert "1 of 1 covered, 0 ran; 1 pieces of code" in " ".join(ran.out.split())
    assert max(map(len, lines)) < 100

    (caches / "card.json").write_text(record_of({"capability": [8, 9]}))
    shared = ("--tp", "8", "--decode-context-parallel-size", "2")
    ran = coverage(monkeypatch, norm, "--target", "sm_89", *shared)
    assert "one of 8 ranks, 2 of which divide caches, on sm_89" in " ".join(ran.out.split())
    ran = coverage(monkeypatch, norm, "--target", "sm_89", "--json")
    assert ran.code == 0
    (report,) = json.loads(ran.out)
    (row,) = report["rows"]
    assert (report["target"], report["covered"], report["uncovered"]) == ("sm_89", 1, 0)
    assert (row["ran_on"], row["backend"], row["launches"]) == ("Some Card", "triton", 1)
    assert row["code"][0]["registers"] == row["registers"] > 16


def test_what_is_not_covered_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Use("norm.rms_norm", RmsNormCase(1024, dtype="bfloat16"), (DECODE,))
    order = "norm.rms_norm=reference"
    ran = coverage(monkeypatch, odd, "--target", "sm_80", "--kernel-order", order)
    assert ran.code == 1
    assert "  decode: reference, NOT COVERED" in ran.out
    assert "  norm.rms_norm: width 1024, decode: only the reference serves it" in ran.out
    ran = coverage(monkeypatch, odd, "--target", "sm_80", "--kernel-order", "norm=triton")
    assert ran.code == 2
    assert "names the unknown op norm" in ran.err


def test_a_proof_counts_for_its_card_its_sources_and_its_results(caches: Path) -> None:
    path = caches / "card.json"
    name = ("norm.rms_norm", json.dumps({"dtype": "bfloat16", "eps": 1e-6, "width": 1024}))
    for card, problem, target, counts in (
        ({"capability": [8, 9]}, "", "sm_89", True),
        ({"capability": [9, 0], "code_for": "sm_89"}, "", "sm_89", True),
        ({"capability": [9, 0]}, "", "sm_89", False),
        ({"capability": [8, 9], "kernels": "other"}, "", "sm_89", False),
        ({"capability": [8, 9]}, "off by 3", "sm_89", False),
        ({"device": "cpu"}, "", "sm_89", False),
    ):
        path.write_text(record_of(card, problem))
        assert ((*name, "triton") in cards_that_ran(target)) == counts
    path.write_text(record_of({"capability": [8, 9]}).replace("Some Card", "Other"))
    assert not cards_that_ran("sm_89")


def test_options_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = metainfer("kernels", "coverage", "--target", "sm_75")
    assert (ran.code, ran.out) == (2, "")
    assert "there are no kernels for 'sm_75'" in ran.err
    assert "must be at least 1" in metainfer("kernels", "coverage", "--tp", "0").err
    shared = ("--tp", "8", "--prefill-context-parallel-size", "3")
    ran = metainfer("kernels", "coverage", "deepseek-v4-flash", *shared)
    assert "--prefill-context-parallel-size 3 does not divide 8 ranks" in ran.err
    assert "cannot be divided over 3" in metainfer("kernels", "coverage", "pebble", "--tp", "3").err
    monkeypatch.setattr(on_paper, "has_triton", lambda: False)
    ran = metainfer("kernels", "coverage", "pebble")
    assert "need triton, which is not installed\nhint: pip install 'metainfer[kernels]'" in ran.err


def test_list() -> None:
    ran = metainfer("kernels", "list")
    assert (ran.code, ran.err) == (0, "")
    assert "norm.rms_norm, " in ran.out
    assert "\n\nnative: C, compiled here;" in ran.out
    assert max(map(len, ran.out.splitlines())) < 100
    listed = json.loads(metainfer("kernels", "list", "--json").out)
    norm = listed["norm.rms_norm"]
    assert set(norm["chosen"]) == {"cpu", *CARD_KINDS}
    assert norm["chosen"]["sm_80"] == {"triton": norm["cases"]}
    assert {"triton", "cpu", "reference"} <= set(norm["backends"])


def test_explain() -> None:
    ran = metainfer("kernels", "explain", "attention.sparse_prefill", "--model", "glm-5.3")
    assert (ran.code, ran.err) == (0, "")
    assert "heads 64, width 512, ratio 1, topk 2048, rope_extra 64" in ran.out
    assert "cuda: is written with instructions that sm_90 alone has" in " ".join(ran.out.split())
    assert max(map(len, ran.out.splitlines())) < 100
    for op in ("moe.experts", "moe.experts_fp8_rows"):  # as CPUs and as GPUs bind them
        ran = metainfer("kernels", "explain", op, "--model", "deepseek-v4-flash", "--target", "89")
        assert (ran.code, ran.err) == (0, "")
    arguments = ("norm.rms_norm", "--target", "cpu", "80", "--json")
    told = json.loads(metainfer("kernels", "explain", *arguments).out)
    assert {one["target"] for one in told} == {"cpu", "sm_80"}
    reasons = {v["backend"]: v["reason"] for v in told[-1]["verdicts"]}
    assert reasons["reference"] == "not in the kernel order"


def test_explain_refuses_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = metainfer("kernels", "explain", "norm.rms")
    assert ran.code == 2
    assert "did you mean norm.rms_norm?" in ran.err
    ran = metainfer("kernels", "explain", "hc.mix", "--model", "glm-5.3")
    assert "glm-5.3 does not run hc.mix" in ran.err
    monkeypatch.setattr(on_paper, "has_triton", lambda: False)
    monkeypatch.setattr("metainfer.cli.kernels_list.find_spec", lambda name: None)
    for arguments in (("list",), ("explain", "norm.rms_norm")):
        ran = metainfer("kernels", *arguments)
        assert (ran.code, "without triton" in ran.err) == (0, True)
