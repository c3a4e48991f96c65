"""Cases with an infinite limit: records of them are signed, read, and known by the same name."""

from __future__ import annotations

import json
import math
from pathlib import Path

from metainfer.kernels.registry import Kernel
from metainfer.kernels.verify_known import known, unverified
from metainfer.kernels.verify_record import keep, make_record, read_record
from metainfer.kernels.verify_run import Check, Outcome, Sizes, Verified, Where
from metainfer.ops.base import Load, case_fields
from metainfer.ops.moe import SwigluCase

OP = "moe.swiglu"
CASE = SwigluCase(64, math.inf)


def test_no_limit_is_signed_as_a_string(tmp_path: Path) -> None:
    sizes = Sizes.of("cpu")
    facts = {"device": "cpu", "code_for": None, "kernels": "abc", "name": "some cpu"}
    checks = [Check(OP, CASE, "decode", Load(4, 100))]
    where = Where("cpu", None, "", 5, "bfloat16")
    verified = Verified((Outcome("cpu", 0.0, ""),), None)
    record = make_record({"date": "2026"}, facts, {"model": "tiny"}, where, sizes, checks, verified)
    assert record["cases"][0]["case"]["limit"] == "inf"
    assert read_record(json.dumps(record)) == record
    keep(record, tmp_path)
    passed = known(facts, "bfloat16", tmp_path).passed
    assert passed == {(OP, json.dumps(case_fields(CASE), sort_keys=True), "cpu")}
    kernels = [Kernel(OP, "cpu", case, id, id) for case in (CASE, SwigluCase(64, 7.0))]
    assert {kernel.case for kernel in unverified(kernels, passed).values()} == {kernels[1].case}
