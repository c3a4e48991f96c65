"""Records that strangers made, or that were cut short, are refused in a sentence: their hash is
right, and what they say is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import UserError
from metainfer.core.files import replace_file
from metainfer.kernels import tune_record, verify_record
from metainfer.kernels.tune import TimedRows
from metainfer.kernels.tune_run import Finding
from metainfer.kernels.verify_known import known
from metainfer.kernels.verify_record import read_record, sign
from metainfer.ops.base import Target
from metainfer.ops.norm import RmsNormCase
from tests.fakes.command import metainfer

CASE = {
    "op": "norm.rms_norm",
    "case": {"width": 64},
    "phase": "decode",
    "rows": 1,
    "tokens": 2048,
    "backend": "cpu",
    "state": "passed",
    "error": 0.0,
    "tolerance": 1e-2,
    "problem": "",
    "seconds": 1e-6,
    "floor_s": 1e-7,
    "bound": "bytes",
}
VERIFIED: dict[str, Any] = {
    "kind": verify_record.KIND,
    "version": verify_record.RECORD_VERSION,
    "date": "2026-01-01",
    "card": {"device": "cpu", "name": "some card", "code_for": None, "kernels": "abc"},
    "cache_dtype": "bfloat16",
    "rates": None,
    "whole_sizes": True,
    "partial": [],
    "passed": 1,
    "failed": 0,
    "not_run": 0,
    "not_verified": 0,
    "cases": [CASE],
}

Change = Callable[[dict[str, Any]], Any]


def changed(record: dict[str, Any], change: Change) -> str:
    """Changed, and signed as if it had been made so."""
    other = copy.deepcopy(record)
    change(other)
    return json.dumps(sign(other))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.pop("cases"), "['cases']: it is missing"),
        (lambda r: r.update(cases=5), "['cases']: it is not a list"),
        (lambda r: r["cases"][0].update(case=None), "['cases'][0]['case']: it is not an object"),
        (lambda r: r["cases"][0].update(seconds="1"), "['seconds']: it is not a number above 0"),
        (lambda r: r["cases"][0].update(seconds=0), "['seconds']: it is not a number above 0"),
        (lambda r: r["cases"][0].update(state="fine"), "['state']: it is not one of passed"),
        (lambda r: r["cases"][0].update(rows=True), "['rows']: it is not a whole number"),
        (lambda r: r["cases"][0]["case"].update(form="\x1b[2J"), "['form']: it is not one line"),
        (lambda r: r.update(card="mine"), "['card']: it is not an object"),
        (lambda r: r["card"].update(name="\x1b]0;title\x07"), "['name']: it is not one line"),
        (lambda r: r["card"].update(device="cuda"), "['capability']: it is missing"),
        (lambda r: r.update(passed="all"), "['passed']: it is not a whole number"),
    ],
)
def test_a_signed_record_of_verification_that_says_nonsense_is_refused(
    change: Change, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    path.write_text(changed(VERIFIED, change))
    ran = metainfer("verify", "--show", str(path))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {path}: the record cannot be read: ")
    assert said in ran.err


def test_a_record_of_verification_that_says_all_is_read_and_counts(tmp_path: Path) -> None:
    record = read_record(json.dumps(sign(VERIFIED)))
    path = verify_record.keep(record, tmp_path)
    assert known(record["card"], "bfloat16", tmp_path).passed
    path.write_text(changed(VERIFIED, lambda r: r.pop("cache_dtype")))
    assert not known(record["card"], "bfloat16", tmp_path).passed


def test_a_number_beyond_all_numbers_is_a_changed_record() -> None:
    text = json.dumps(sign(VERIFIED)).replace('"seconds": 1e-06', '"seconds": 1e999')
    with pytest.raises(UserError, match="was changed after it was made"):
        read_record(text)


TUNED_CARD = {"device": "cpu", "name": "some card"}


def tuned_record(cache: Path) -> dict[str, Any]:
    sizes = (TimedRows(1, (2048,), "calls", {"cpu": 1e-6, "native": 2e-6}),)
    found = Finding("norm.rms_norm", RmsNormCase(64), sizes, (("composed", "printed\n\x1b[1m"),))
    path = tune_record.keep(TUNED_CARD, tune_record.Conditions("bfloat16", 2), [found], {}, cache)
    record: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return record


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["card"].pop("device"),
        lambda r: r["entries"][0].pop("case"),
        lambda r: r["entries"][0].pop("op_version"),
        lambda r: r["entries"][0].update(date=5),
        lambda r: r["entries"][0].update(sizes=None),
        lambda r: r["entries"][0].update(bad=[5]),
        lambda r: r["entries"][0]["sizes"][0].update(rows="8"),
        lambda r: r["entries"][0]["sizes"][0].update(seconds={"cpu": 0, "native": 0}),
        lambda r: r["entries"][0]["sizes"][0].update(seconds={"cpu": None}),
    ],
)
def test_a_signed_record_of_tuning_that_says_nonsense_is_ignored(
    change: Change, tmp_path: Path
) -> None:
    record = tuned_record(tmp_path)
    path = tmp_path / "one.json"
    path.write_text(json.dumps(record))
    found = tune_record.find(TUNED_CARD, tmp_path)
    assert len(found.entries) == 1
    assert dict(found.tuned(Target("cpu")).measured)
    path.write_text(changed(record, change))
    found = tune_record.find(TUNED_CARD, tmp_path)
    assert (found.entries, found.others) == ((), ())
    assert f"{path} is ignored: the record cannot be read: " in found.broken[0]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace_file(path, b"first")
    replace_file(path, b"second")
    assert path.read_bytes() == b"second"
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        replace_file(tmp_path / "taken", b"third")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["record.json", "taken"]


def test_what_others_may_write_counts_for_nothing(tmp_path: Path) -> None:
    record = read_record(json.dumps(sign(VERIFIED)))
    verify_record.keep(record, tmp_path)
    (tmp_path / "tuned.json").write_text(json.dumps(tuned_record(tmp_path / "other")))
    tmp_path.chmod(0o777)
    assert not known(record["card"], "bfloat16", tmp_path).passed
    found = tune_record.find(TUNED_CARD, tmp_path)
    assert found.entries == ()
    assert found.broken == (f"what was tuned is ignored: {tmp_path} may be written by other users",)
    tmp_path.chmod(0o755)
    assert known(record["card"], "bfloat16", tmp_path).passed
    assert len(tune_record.find(TUNED_CARD, tmp_path).entries) == 1
    assert tune_record.find(TUNED_CARD, tmp_path / "nowhere").broken == ()
