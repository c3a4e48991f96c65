"""A commissioning: all steps whatever becomes of one, one file, and a rerun that goes on."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench.commission import Outcome, State, exit_code, read_record
from metainfer.bench.commission_report import report
from metainfer.cli import commission as verb
from metainfer.cli import commission_steps, step_process
from metainfer.cli.commission import CommissionOptions, commission
from metainfer.cli.commission_steps import Asked, LeftOut, Step
from metainfer.cli.step_process import Ended, Job, done_here
from metainfer.cli.terminal import Terminal
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Gpu
from metainfer.kernels.verify_record import sign
from tests.fakes import step_verbs
from tests.fakes.command import metainfer
from tests.fakes.machines import make_machine, two_sockets

RECORD = {"command": ["metainfer", "/home/alice"], "found": 7}


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_process, "done_apart", done_here)


def step(name: str, run: Callable[..., int], *options: Any, file: bool = False) -> Step:
    def job(asked: Asked, share_s: float) -> Job:
        first = (asked.directory / f"{name}.json",) if file else ()
        return Job(run, (*first, *options), share_s)

    return Step(name, "of a test", 1, f"{name}.json", job)


def good(name: str, code: int = 0) -> Step:
    return step(name, step_verbs.writes, RECORD, code, file=True)


def interrupted(name: str, error: BaseException) -> Step:
    def job(asked: Asked, share_s: float) -> Job:
        raise error

    return Step(name, "of a test", 1, f"{name}.json", job)


def run(
    directory: Path, *steps: Step, **options: Any
) -> tuple[dict[str, Any], dict[str, State], str]:
    """The record, how each step ended, and what a person read."""
    directory.mkdir(exist_ok=True)
    err = io.StringIO()
    where = Terminal(io.StringIO(), err, colour=False, live=False)
    record = commission(where, CommissionOptions(directory=directory, **options), steps)
    assert record == read_record(directory / "commission.json")
    return record, {one["name"]: State(one["state"]) for one in record["steps"]}, err.getvalue()


def test_every_step_is_told_and_none_stops_the_others(tmp_path: Path) -> None:
    def without(asked: Asked, share_s: float) -> LeftOut:
        return LeftOut("there is nothing")

    def unable(asked: Asked, share_s: float) -> Job:
        raise UserError("the plan cannot be read")

    steps = (
        step("refused", step_verbs.refuses, "take less"),
        step("crashed", step_verbs.raises),
        good("failed", 1),
        good("partial", 3),
        Step("without", "", 1, "without.json", without),
        Step("unable", "", 1, "unable.json", unable),
        good("done"),
    )
    record, states, said = run(tmp_path, *steps)
    assert states == {
        "refused": State.REFUSED,
        "crashed": State.CRASHED,
        "failed": State.FAILED,
        "partial": State.PARTIAL,
        "without": State.LEFT_OUT,
        "unable": State.REFUSED,
        "done": State.DONE,
    }
    assert exit_code(record) == 1
    whys = {one["name"]: one["why"] for one in record["steps"]}
    assert whys["refused"] == "it does not fit (take less)"
    assert "RuntimeError: a bug in somewhere" in whys["crashed"]
    assert whys["without"] == "there is nothing" and whys["unable"] == "the plan cannot be read"
    assert "--again partial" in said and "7 of 7  done: of a test" in said
    assert [one["record"] for one in record["steps"]][-1] == {"found": 7}
    told = report(record)
    assert "CRASHED CRASHED" in told and "PARTIAL PARTIAL" in told and record["sha256"] in told
    assert str(tmp_path) not in json.dumps(record)


def test_a_late_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(job: Job, terminal: Terminal) -> Ended:
        return Ended(step_process.EXIT_LATE, "it did not end")

    monkeypatch.setattr(step_process, "done_apart", late)
    record, states, _ = run(tmp_path, good("slow"))
    assert states == {"slow": State.LATE} and exit_code(record) == 1


def test_a_verb_that_ends_well_before_all_was_done(tmp_path: Path) -> None:
    stages = next(step for step in commission_steps.STEPS if step.name == "stages")
    talk = next(step for step in commission_steps.STEPS if step.name == "communication")
    found = {"rounds": 1, "load": {"rounds": 3}}
    short = replace(step("short", step_verbs.writes, found, file=True), unreached=stages.unreached)
    record, states, _ = run(tmp_path, short)
    assert states == {"short": State.PARTIAL} and exit_code(record) == 3
    assert record["steps"][0]["why"] == "1 of 3 rounds were completed"
    assert stages.unreached({"rounds": 3, "load": {"rounds": 3}}) == ""
    assert talk.unreached({"sizes_not_reached": [1, 2]}) == "2 sizes were not reached"
    assert talk.unreached({"gpus": []}) == ""


def test_a_rerun_does_what_has_not_ended(tmp_path: Path) -> None:
    first, _, _ = run(tmp_path, good("one"), step("two", step_verbs.refuses, ""), good("three", 3))
    assert exit_code(first) == 1
    again, states, said = run(tmp_path, good("one", 1), good("two"), good("three"), budget_s=5.0)
    assert states == {"one": State.DONE, "two": State.DONE, "three": State.PARTIAL}
    assert exit_code(again) == 3
    assert said.count("done before, on ") == 1 and said.count("partial before, on ") == 1
    last, states, _ = run(tmp_path, good("one"), good("two"), good("three"), again=("three",))
    assert states["three"] is State.DONE and exit_code(last) == 0


def test_a_step_whose_file_is_gone_is_done_again(tmp_path: Path) -> None:
    run(tmp_path, good("one", 3))
    (tmp_path / "one.json").unlink()
    assert run(tmp_path, good("one"))[1] == {"one": State.DONE}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interruption_loses_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(tmp_path, good("one"), interrupted("two", error), good("three"))
    record = read_record(tmp_path / "commission.json")
    assert [(one["name"], one["state"]) for one in record["steps"]] == [
        ("one", State.DONE),
        ("two", State.INTERRUPTED),
    ]
    assert exit_code(record) == 3
    with pytest.raises(type(error)):
        run(tmp_path, interrupted("one", error), again=("one",))
    kept = read_record(tmp_path / "commission.json")["steps"]
    assert kept[0]["state"] == State.DONE  # as it ended before
    _, states, said = run(tmp_path, good("one"), good("two"), good("three"))
    assert set(states.values()) == {State.DONE} and "interrupted" not in said


def test_another_commissioning_leaves_the_first_one_there(tmp_path: Path) -> None:
    first, _, _ = run(tmp_path, good("one", 1))
    _, states, said = run(tmp_path, good("one"), objective="ttft")
    assert states == {"one": State.DONE}
    place = tmp_path / f"commission-{first['sha256'][:8]}.json"
    assert f"of another objective: it is kept as {place.name}" in said
    assert read_record(place) == first


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    run(tmp_path, good("one"))
    path = tmp_path / "commission.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"done"', '"late"'), encoding="utf-8")
    with pytest.raises(UserError, match="was changed"):
        run(tmp_path, good("one"))
    told = metainfer("commission", "--show", str(path))
    assert told.code == 2 and "was changed" in told.err
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is not a record of metainfer commission") as error:
        run(tmp_path, good("one"))
    assert error.value.hint is not None and "--dir" in error.value.hint


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": None},
        {"steps": [{"name": "one"}]},
        {"asked": {}},
        {"steps": [asdict(Outcome("a", State.DONE, "", "", "soon", None))]},  # type: ignore[arg-type]
        {"steps": [asdict(Outcome("a", "well", "", "", 1.0, None))]},  # type: ignore[arg-type]
    ],
)
def test_a_strangers_record_is_read_with_care(tmp_path: Path, changed: dict[str, Any]) -> None:
    record, _, _ = run(tmp_path, good("one"))
    path = tmp_path / "commission.json"
    path.write_text(json.dumps(sign({**record, **changed})), encoding="utf-8")
    told = metainfer("commission", "--show", str(path))
    assert told.code == 2 and "is not as metainfer commission writes it" in told.err


def test_a_step_whose_record_is_another_is_told_of(tmp_path: Path) -> None:
    for name in (step.name for step in commission_steps.STEPS):
        record, _, _ = run(tmp_path / name, good(name))
        text = report(record)
        assert "its record cannot be read" in text, name
    odd = sign({**record, "asked": {**record["asked"], "model": "\x1b[31mred"}})
    assert "?[31mred" in report(odd) and "\x1b" not in report(odd)


def test_what_each_step_found_is_told(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    told = metainfer("plan", "deepseek-v4-flash", "--machine", "rtx-pro-6000-x4", "-o", str(plan))
    assert told.code == 0
    machine = json.loads(two_sockets().to_json())
    point = {"operation": "all_reduce", "name": "ring", "wrong": "other data"}
    norm = {"op": "norm.rms_norm", "case": {}, "backend": "cpu", "problem": ""}
    counts = {"passed": 1, "failed": 1, "not_run": 0, "not_verified": 3}
    entry = {"op": "norm.rms_norm", "case": {}, "sizes": [{}], "bad": {"native": "off by one"}}
    stages = Path(__file__).parents[2] / "docs" / "benchmarks" / "stages.json"
    records = {
        "probe": machine,
        "communication": {"routes": ["all_reduce: ring"], "points": [point]},
        "plan": json.loads(plan.read_text(encoding="utf-8")),
        "verify": {**counts, "cases": [norm, *[{**norm, "problem": "worse"}] * 10]},
        "tune": {"entries": [entry]},
        "stages": json.loads(stages.read_text(encoding="utf-8")),
    }
    steps = [step(name, step_verbs.writes, found, file=True) for name, found in records.items()]
    record, _, _ = run(tmp_path / "box", *steps)
    text = report(record)
    assert "cannot be read" not in text
    for line in (
        "  5 x a card; Quick 9000, 8 cores, 34.4 GB of memory",
        "  all_reduce: ring",
        "  WRONG DATA: all_reduce by ring",
        "  1 passed, 1 failed, 3 not verified, of 11 checks",
        "  and 2 more, in the record",
        "  1 operations were timed",
    ):
        assert line in text.splitlines()
    assert "tokens/s of input" in text and "native: off by one" in text and "TTFT p95" in text
    on_gpus = step("communication", step_verbs.writes, machine, file=True)
    told_of_gpus = report(run(tmp_path / "gpus", on_gpus)[0])
    assert "  0 curves and 0 rates were measured" in told_of_gpus.splitlines()


def test_show_and_json(tmp_path: Path) -> None:
    record, _, _ = run(tmp_path, good("one", 3))
    path = str(tmp_path / "commission.json")
    told = metainfer("commission", "--show", path, "--json")
    assert told.code == 3 and json.loads(told.out) == record
    assert record["sha256"] in metainfer("commission", "--show", path).out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--again", "dance"), "--again: there is no step 'dance'"),
        (("/nowhere/model",), "/nowhere/model"),
        (("--dir", "/proc/nowhere"), "--dir: nothing can be written in /proc"),
    ],
)
def test_refusals_come_before_any_step(arguments: tuple[str, ...], sentence: str) -> None:
    told = metainfer("commission", *arguments)
    assert told.code == 2 and sentence in told.err and "1 of" not in told.err


def shares(budget_s: float, *weights: float) -> list[float]:
    found: list[float] = []

    def job(asked: Asked, share_s: float) -> LeftOut:
        found.append(share_s)
        return LeftOut("")

    steps = [Step(f"{n}", "", weight, f"{n}", job) for n, weight in enumerate(weights)]
    where = Terminal(io.StringIO(), io.StringIO(), colour=False, live=False)
    commission(where, CommissionOptions(directory=Path("here"), budget_s=budget_s), steps)
    return found


def test_what_a_step_leaves_goes_to_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "time", type("Clock", (), {"monotonic": lambda: 0.0}))
    assert shares(1000.0, 1, 3, 6) == [100.0, pytest.approx(1000 / 3), 1000.0]
    assert shares(3.0, 1, 1) == [10.0, 10.0]  # little, and not nothing


def asked_on(directory: Path, gpus: int, **fields: Any) -> Asked:
    cards = tuple(Gpu("a card", (12, 0), 96 * 2**30, 95 * 2**30) for _ in range(gpus))
    asked = Asked("pebble", None, "throughput", None, directory, make_machine(gpus=cards))
    return replace(asked, **fields)


def jobs(asked: Asked) -> dict[str, Job | LeftOut]:
    return {step.name: step.job(asked, 60.0) for step in commission_steps.STEPS}


def test_steps_on_a_cpu(tmp_path: Path) -> None:
    found = jobs(asked_on(tmp_path, 0))
    assert [name for name, job in found.items() if isinstance(job, LeftOut)] == ["plan", "ranks"]
    stages = found["stages"]
    assert isinstance(stages, Job) and stages.longest_s > 60
    load, settings, _ = stages.options
    assert load.layers is None and load.budget_s == 60 and settings.load_format == "auto"
    large = jobs(asked_on(tmp_path, 0, model="deepseek-v4-flash"))["stages"]
    assert isinstance(large, LeftOut) and "deepseek-v4-flash" in large.why


def test_steps_on_gpus(tmp_path: Path) -> None:
    asked = asked_on(tmp_path, 2, model="deepseek-v4-flash")
    found = jobs(asked)
    ranks = found.pop("ranks")
    assert isinstance(ranks, LeftOut) and "there is no plan" in ranks.why
    assert all(isinstance(job, Job) for job in found.values())
    assert isinstance(found["communication"], Job) and found["communication"].options[0].measure
    assert isinstance(found["stages"], Job)
    load, settings, _ = found["stages"].options
    assert load.layers == commission_steps.LAYERS and settings.load_format == "dummy"
    told = metainfer("plan", "deepseek-v4-flash", "--machine", "rtx-pro-6000-x4", "-o",
                     str(tmp_path / "plan.json"))  # fmt: skip
    assert told.code == 0
    with_plan = jobs(asked)
    assert asked.tensor_ranks == 2
    assert isinstance(with_plan["ranks"], Job) and isinstance(with_plan["verify"], Job)
    assert with_plan["verify"].options[0].tensor_parallel_size == 2
    assert with_plan["ranks"].options[1].tensor_parallel_size == 2
    assert jobs(replace(asked, device="cpu")).keys() == with_plan.keys()


def test_a_model_that_no_engine_runs(tmp_path: Path) -> None:
    found = jobs(asked_on(tmp_path, 1, model="glm-5.3"))
    stages = found["stages"]
    assert isinstance(stages, LeftOut) and "glm" in stages.why.casefold()
    assert isinstance(found["verify"], Job) and isinstance(found["tune"], Job)


@pytest.mark.soak
def test_the_shipped_model_on_this_machine(tmp_path: Path) -> None:
    """Killed half-way without a word, gone on with, and shown."""
    directory = tmp_path / "box"
    words = [sys.executable, "-m", "metainfer", "commission", "--device", "cpu", "--dir",
             str(directory), "--budget", "240", "--json"]  # fmt: skip
    begun = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 600
    file = directory / "commission.json"
    while not (file.exists() and '"communication"' in file.read_text(encoding="utf-8")):
        assert begun.poll() is None and time.monotonic() < until_s
        time.sleep(0.5)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode in (0, 3), done.stderr
    assert "done before" in done.stderr
    record = json.loads(done.stdout)
    assert record == read_record(file)
    states = {one["name"]: one["state"] for one in record["steps"]}
    assert states.pop("plan") == states.pop("ranks") == State.LEFT_OUT
    assert set(states.values()) <= {State.DONE, State.PARTIAL}
    assert str(tmp_path) not in json.dumps(record)
    assert not re.search(
        rf"(?<![\w-]){re.escape(os.uname().nodename)}(?![\w-])", json.dumps(record)
    )
    told = metainfer("commission", "--show", str(file))
    assert "input 256, tok/s" in told.out and "passed" in told.out
