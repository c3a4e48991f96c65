"""`metainfer doctor` on recorded machines, with what kernels know of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metainfer.doctor.examine import all_checks
from tests.fakes.command import metainfer
from tests.fakes.machines import make_machine

ASKED = ("doctor", "deepseek-v4.1-flash", "--machine", "rtx-6000d-x8")


def test_what_an_owner_acts_on_comes_first_and_is_readable():
    ran = metainfer(*ASKED)
    assert ran.code == 1 and ran.err == ""
    lines = ran.out.splitlines()
    # What is to be copied stays whole.
    assert all(len(line) <= 100 or len(line.split()) <= 2 for line in lines)
    levels = [line.split()[0] for line in lines if line.startswith(("FAIL", "WARN", "UNK", "ok"))]
    assert levels == sorted(levels, key=["FAIL", "WARN", "UNKNOWN", "ok"].index)
    for part in ("2 x TP4", "export NCCL_P2P_LEVEL=SYS", "input tok/s", "pull 38969"):
        assert part in " ".join(ran.out.split())
    assert any(line.startswith("ok       kernel coverage:") for line in lines)


def test_findings_as_json_have_the_fields_that_are_documented():
    ran = metainfer(*ASKED, "--json", "--tp", "4")
    told = json.loads(ran.out)
    assert (told["version"], told["kind"], told["exit_code"]) == (1, "findings", ran.code)
    assert told["machine"]["name"] == "rtx-6000d-x8" and len(told["machine"]["gpus"]) == 8
    assert told["model"] == "deepseek-v4.1-flash"
    fields = {"check", "level", "what", "evidence", "matters", "fix", "source"}
    assert all(set(one) == fields for one in told["findings"])
    (covered,) = [one for one in told["findings"] if one["check"] == "kernel coverage"]
    assert covered["evidence"].startswith("TP4: ")
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    documented = page.read_text(encoding="utf-8")
    assert all(f"`{name}`" in documented for name in (*told, *fields))


def test_a_machine_alone_a_card_without_kernels_and_none():
    ran = metainfer("doctor", "--machine", "l40s-x8")
    assert ran.code == 2 and "NCCL against the links" in ran.out
    ran = metainfer("doctor", "deepseek-v4-flash", "--machine", "b300-x8")
    assert "there are no kernels for sm_103" in ran.out


def test_without_a_gpu_a_model_is_not_said_to_be_well(tmp_path):
    (tmp_path / "box.json").write_text(make_machine().to_json())
    ran = metainfer("doctor", "deepseek-v4-flash", "--machine", str(tmp_path / "box.json"))
    told = " ".join(ran.out.split())
    assert "No card was looked at. --machine takes a record" in told and "rtx-6000d-x8" in told


def test_a_model_that_this_engine_does_not_divide_is_examined_too():
    ran = metainfer("doctor", "pebble", "--machine", "rtx-pro-6000-x2")
    assert "memory ledger" in ran.out and "cannot be divided" not in ran.err
    asked = metainfer("doctor", "pebble", "--machine", "rtx-pro-6000-x2", "--tp", "2")
    assert asked.code == 2 and "cannot be divided over 2 ranks" in asked.err


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    _, _, case = page.read_text(encoding="utf-8").partition("## A case")
    script, shown = (case.split("```")[n] for n in (1, 3))
    monkeypatch.chdir(tmp_path)
    exec(script.removeprefix("python"), {})
    ran = metainfer("doctor", "deepseek-v4-flash", "--machine", "box.json")
    assert ran.code == 2
    printed = ran.out.split("\n\n")
    findings = shown.strip("\n").split("\n\n")
    assert len(findings) == 4 and all(finding in printed for finding in findings)


def test_lists():
    listed = metainfer("doctor", "--list")
    assert listed.code == 0 and all(check.name in listed.out for check in all_checks())
    told = json.loads(metainfer("doctor", "pebble", "--matrix", "--json").out)
    assert {"feature": "images", "flag": "", "state": "no effect",
            "why": "the model has no image tower"} in told["features"]  # fmt: skip
    assert told["kind"] == "support matrix" and told["layouts"] == []  # no card is here
    ran = metainfer("doctor", "deepseek-v4.1-flash", "--matrix", "--machine", "rtx-6000d-x8")
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "TP8 EP8" in ran.out and "--enable-dp-attention (SGLang)" in ran.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--matrix",), "--matrix is about a model"),
        (("--port", "70000"), "is no TCP port"),
        (("--port", "80", "--machine", "l40s-x8"), "--port looks at the machine at hand"),
        (("--machine", "nowhere"), "no recorded machine"),
        (("--tp", "0"), "at least 1"),
        (("--tp", "4"), "--tensor-parallel-size is about a model"),
        (("--log", "server.log", "--tp", "4"), "about a log alone"),
        (("--list", "--tp", "4"), "about the checks alone"),
        (("pebble", "--matrix", "--tp", "4"), "--matrix compiles nothing"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], sentence: str):
    ran = metainfer("doctor", *arguments)
    assert ran.code == 2 and sentence in ran.err
