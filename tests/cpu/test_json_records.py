"""docs/reference/json-records.md names every field of the records that it is about."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from metainfer.bench.commission import Ledger
from metainfer.bench.commission import Outcome as StepOutcome
from metainfer.bench.commission import State as StepState
from metainfer.bench.model import Work
from metainfer.bench.record import provenance
from metainfer.bench.sendable import Discretion
from metainfer.bench.stages import DECODE, PREFILL, TRAFFIC
from metainfer.bench.stages_report import work_record
from metainfer.kernels.verify_record import card_facts, make_record
from metainfer.kernels.verify_run import Check, Outcome, Sizes, Verified, Where
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates
from tests.fakes.command import metainfer
from tests.fakes.machines import make_machine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "json-records.md").read_text(encoding="utf-8")


def documented(verb: str) -> set[str]:
    """Names in the section about a verb, and those that all records of measurements have."""
    first, *sections = PAGE.split("\n## ")
    (section,) = (text for text in sections if verb in text.splitlines()[0])
    return set(re.findall(r"`([a-z0-9_]+)`", first + section))


def missing(verb: str, names: Iterable[str]) -> set[str]:
    return set(names) - documented(verb)


def test_env() -> None:
    told = json.loads(metainfer("env", "--json").out)
    assert not missing("metainfer env", [*told, *told["machine"], *told["plan"]])
    assert not missing("metainfer env", told["plan"]["values"]["device"])
    assert "refused" in documented("metainfer env")


def test_verify() -> None:
    op = OPS["norm.rms_norm"]
    check = Check(op.name, op.small_cases[0], "decode", Load(1, 64))
    machine = make_machine()
    record = make_record(
        provenance(),
        card_facts(machine, "cpu"),
        {"model": "pebble", "tensor_parallel_size": 1, "part": None},
        Where("cpu", None, "", 0),
        Sizes.of("cpu"),
        [check],
        Verified((Outcome("cpu", 0.0, "", 1e-6),), Rates(1e9, {"float32": 1e9}, 1e-6)),
    )
    names = [*record, *record["card"], *record["rates"], *record["cases"][0]]
    assert not missing("metainfer verify", names)
    assert f'`"metainfer verify"`, {record["version"]}' in PAGE


def test_bench_stages() -> None:
    record = json.loads((ROOT / "docs" / "benchmarks" / "stages.json").read_text(encoding="utf-8"))
    names = {*record, "not_cold"}
    for side in record["sides"].values():
        names |= {*side, *side["receipt"]}
    for work in record["works"]:
        names |= {*work} | {name for side in work["sides"].values() for name in side}
    one = {"seconds": 1.0, "tokens": 2, "cached_tokens": 0}
    served = {"ended_s": 1.0, "tpot_s": None, "ttft_s": 0.5, "prompt_tokens": 1,
              "output_tokens": 1, "cached_tokens": 0}  # fmt: skip
    for do, turn in ((PREFILL, one), (DECODE, one), (TRAFFIC, {"served": [served]})):
        names |= set(work_record(Work("a", do, 1, 1, 1), [turn]))
    assert not missing("metainfer bench stages", names)


def test_commission(tmp_path: Path) -> None:
    machine = make_machine()
    asked = {"model": "", "workload": None, "objective": "", "device": None, "budget_s": 1.0}
    ledger = Ledger(tmp_path, asked, "", machine, Discretion({}))
    outcome = StepOutcome("probe", StepState.DONE, "", "", 0.5, None)
    record = ledger.keep(outcome, ["probe"])
    names = {*record, *record["asked"], *record["steps"][0]}
    assert not missing("metainfer commission", names)
    assert "command" not in names
    section = PAGE.partition("## `metainfer commission")[2]
    assert all(f'"{state}"' in section for state in StepState)
    assert f'`"{record["kind"]}"`, {record["version"]}' in section


def test_weights_check() -> None:
    told = json.loads(metainfer("weights", "check", "--json").out)
    assert not missing("metainfer weights check", [*told, *told["groups"][0], "kind", "text"])
