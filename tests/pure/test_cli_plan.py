"""`metainfer plan` on recorded machines, with the ledger of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.command import metainfer


def test_a_plan_as_text_and_as_a_record(tmp_path: Path) -> None:
    asked = ("plan", "deepseek-v4-flash", "--machine", "rtx-pro-6000-x4")
    ran = metainfer(*asked, "-o", str(tmp_path / "plan.json"))
    assert ran.code == 0 and "prefill    " in ran.out and "tok/s" in ran.out
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert written["chosen"]["name"].split(" |")[0] in ran.out
    memory = written["chosen"]["memory"]
    assert 0 < sum(line["bytes"] for line in memory["lines"]) <= memory["limit_bytes"]
    # 160 GB of weights on cards of 96 GB.
    assert any(rejected["name"] == "4 x 1 GPU" for rejected in written["rejected"])
    assert json.loads(metainfer(*asked, "--json").out) == written


def test_an_explanation_of_a_long_context() -> None:
    ran = metainfer(
        "plan", "glm-5.3", "--machine", "rtx-6000d-x8", "--explain",
        "--workload", "input=128K,output=512,concurrency=2,context=1048576",
    )  # fmt: skip
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 100
    for part in ("Where a decode step goes", "Why not the others:", "Refused", "experts fp4"):
        assert part in ran.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("deepseek-v4-flash", "--machine", "nowhere"), "'nowhere' is no file and no recorded"),
        (("deepseek-v4-flash", "--workload", "input=x"), "input=x is not a number"),
        (("deepseek-v4-flash", "--objective", "fame"), "'fame' is not one of"),
        (("glm-5.3", "--machine", "rtx-5070ti-x2"), "no layout of 2 GPUs holds glm-5.3"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    ran = metainfer("plan", *arguments)
    assert ran.code == 2 and sentence in ran.err
