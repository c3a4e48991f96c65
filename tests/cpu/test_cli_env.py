"""`metainfer env`: the report holds the machine, no secrets, and a plan or why there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metainfer.hardware.machine import Machine
from metainfer.plan.plan import Plan
from tests.fakes.command import metainfer


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_API_KEY", "hush")


def test_json_reads_back_as_the_records() -> None:
    ran = metainfer("env", "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    machine = Machine.from_json(json.dumps(report["machine"]))
    assert machine.cpu.physical_cores >= 1
    assert Plan.from_json(json.dumps(report["plan"])).tensor_parallel_size.value == 1
    assert report["variables"]["METAINFER_API_KEY"] == "(set)"
    assert "hush" not in ran.out


def test_text_names_machine_versions_and_plan() -> None:
    ran = metainfer("env")
    assert (ran.code, ran.err) == (0, "")
    for label in ("commit", "system", "cpu", "memory", "versions", "model", "max_model_len"):
        assert f"\n{label} " in f"\n{ran.out}"
    assert "hush" not in ran.out


def test_a_model_that_cannot_be_planned_is_part_of_the_report(tmp_path: Path) -> None:
    ran = metainfer("env", str(tmp_path))
    assert (ran.code, ran.err) == (0, "")
    assert f"no plan: {tmp_path} has no config.json" in ran.out
    refused = json.loads(metainfer("env", str(tmp_path), "--json").out)["plan"]["refused"]
    assert "config.json" in refused


def test_a_misspelt_name_gets_the_known_ones_and_no_key() -> None:
    ran = metainfer("env", "pebbel")
    assert (ran.code, ran.err) == (0, "")
    assert "no plan: there is no model at 'pebbel'\nhint: give a checkpoint directory" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "hush" not in ran.out


def test_a_recorded_machine_is_reported_with_its_sources() -> None:
    ran = metainfer("env", "--machine", "rtx-pro-6000-x8")
    assert (ran.code, ran.err) == (0, "")
    for line in (
        "gpu       8x NVIDIA RTX PRO 6000 Blackwell Workstation Edition, sm_120, 102.6 GB",
        "link      8x PCIe generation 5, 16 lanes, 63.0 GB/s each way",
        "shared    switch 3 by GPUs 6, 7",
        "peers     56 of 56 ways from GPU to GPU reach the other's memory",
        "source    rates: cards.json: RTX PRO 6000",
    ):
        assert line in ran.out
    assert max(map(len, ran.out.split("\nsource", 1)[0].splitlines())) <= 100
    sides = metainfer("env", "--machine", "l40s-x8").out
    assert "\nsockets   GPUs 0, 1, 2, 3 and GPUs 4, 5, 6, 7\n" in sides
    alone = " ".join(metainfer("env", "--machine", "rtx-4090-x4").out.split())
    assert "peers 0 of 12 ways" in alone and "12x not supported by the driver as shipped" in alone
    report = json.loads(metainfer("env", "--machine", "b300-x8", "--json").out)
    assert report["machine"]["nvlink"] is True


@pytest.mark.parametrize("verb", ["serve", "run", "verify", "bench serve", "bench ops"])
def test_verbs_that_need_the_machine_itself_refuse_a_recorded_one(verb: str) -> None:
    ran = metainfer(*verb.split(), "--machine", "rtx-pro-6000-x8")
    assert ran.code == 2 and ran.out == ""
    assert f"metainfer {verb} has no flag --machine" in ran.err
    assert "hint: it works on the machine at hand" in ran.err


def test_the_plan_is_that_of_the_named_machine_and_no_line_is_wider_than_a_page() -> None:
    ran = metainfer("env", "--machine", "h200-x1")
    assert (ran.code, ran.err) == (0, "") and "\ncuda_graphs " in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100
    refused = metainfer("env", "deepseek-v4-flash", "--machine", "rtx-pro-6000-x8").out
    assert "does not fit" in refused and "hint for `metainfer serve`: what helps" in refused
    other = metainfer("env", "--machine", "b300-x8").out
    assert "no plan: --machine b300-x8: there are no kernels for sm_103" in other
