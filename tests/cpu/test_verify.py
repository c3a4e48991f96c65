"""Verification: what is wrong is found, what crashes costs itself alone, records hold what was."""

from __future__ import annotations

import io
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metainfer.cli import serve
from metainfer.cli.terminal import Terminal
from metainfer.cli.verify import VerifyOptions, checks_for, forms_of, layout_of, sizes_for
from metainfer.core.errors import UserError
from metainfer.hardware.probe import probe
from metainfer.kernels import verify_known, verify_record
from metainfer.kernels.platform import Platform, platform
from metainfer.kernels.processes import in_processes
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.reference.norm import rms_norm
from metainfer.kernels.registry import Backend, Kernel, Registry, no
from metainfer.kernels.verify import check, checks_of, clock, exact_products
from metainfer.kernels.verify_known import known, unverified
from metainfer.kernels.verify_record import keep, read_record, sign
from metainfer.kernels.verify_run import Check, Sizes, State
from metainfer.ops.attention import MergeCase
from metainfer.ops.base import Load, Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.norm import RmsNormCase
from metainfer.ops.targets import parse_capability
from tests.fakes.command import metainfer
from tests.fakes.fragile import fragile

OP = "norm.rms_norm"
CASE = RmsNormCase(64)
ONE = Check(OP, CASE, "decode", Load(4, 100))


def on_cpu(*backends: Backend) -> Platform:
    return Platform("cpu", Target("cpu"), Registry((*backends, *REFERENCE_BACKENDS)), "some cpu")


def one_number_off(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    y_TD = rms_norm(case, x_TD, weight_D)
    y_TD[-1, -1] += 1
    return y_TD


def unwritten(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return torch.empty(x_TD.shape, dtype=torch.bfloat16)


def broken(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("an illegal access\nand more")


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (rms_norm, ""),
        (one_number_off, "off by"),
        (unwritten, "off by nan"),
        (broken, "RuntimeError: an illegal access"),
    ],
)
def test_a_backend_is_compared_with_the_reference(run: Any, problem: str) -> None:
    outcome = check(on_cpu(Backend(OP, "cpu", run)), ONE, "", seed=5)
    assert outcome.backend == "cpu"
    assert outcome.problem.startswith(problem)
    assert bool(outcome.problem) == bool(problem)
    assert (outcome.error < 0.01) == (problem == "")


def test_a_case_that_nothing_serves_is_a_problem() -> None:
    picky = Backend(OP, "cpu", rms_norm, lambda case, target: no("wants 128 channels"))
    outcome = check(on_cpu(picky), ONE, f"{OP}=cpu", seed=5)
    assert outcome.backend == ""
    assert "wants 128 channels" in outcome.problem


def test_a_call_is_timed() -> None:
    assert clock(on_cpu(Backend(OP, "cpu", rms_norm)), ONE, "cpu", seed=5) > 0


def test_products_of_references_are_exact_and_settings_come_back() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_sizes_that_change_nothing_are_left_out() -> None:
    attention = OPS["attention.sparse_decode"].cases["pebble"][1]
    uses = [
        (OP, CASE, "prefill"),
        (OP, CASE, "decode"),
        ("attention.sparse_decode", attention, "decode"),
    ]
    checks = checks_of(uses, Sizes(64, (1, 4), (16, 1024, 10**9)), longest=32768)
    sizes = [(c.op, c.phase, c.load.rows, c.load.tokens) for c in checks]
    assert sizes == [
        (OP, "prefill", 16, 16),
        (OP, "prefill", 64, 1024),
        (OP, "decode", 1, 16),
        (OP, "decode", 4, 16),
        ("attention.sparse_decode", "decode", 1, 64),
        ("attention.sparse_decode", "decode", 1, 4096),
        ("attention.sparse_decode", "decode", 4, 64),
        ("attention.sparse_decode", "decode", 4, 4096),
    ]


def test_checks_follow_the_formats_and_the_layout_of_a_plan() -> None:
    options = VerifyOptions("deepseek-v4-flash", part="attention", entries=(256,))
    checks = checks_for(options, sizes_for(options, "cpu"), 4, "float32")
    attention = [check for check in checks if check.op == "attention.sparse_decode"]
    assert {check.case.heads for check in attention} == {16}
    assert {check.case.dtype for check in checks} == {"float32"}
    assert {check.load.rows for check in attention} == {1, 4}


def test_checks_follow_what_ranks_of_a_plan_share() -> None:
    """Prefill of all heads of the ranks that share tokens, decode of all heads of a shard."""
    sizes = {"tensor": 8, "expert": 2, "prefill_context": 4, "decode_context": 2}
    plan: Any = SimpleNamespace(
        **{f"{name}_parallel_size": SimpleNamespace(value=n) for name, n in sizes.items()}
    )
    assert layout_of(plan, 2) == {"ranks": 2}
    options = VerifyOptions("deepseek-v4-flash", part="attention", entries=(256,))
    forms = layout_of(plan, None) | {"dtype": "bfloat16", "latents": "fp8", "index_keys": "fp8"}
    checks = checks_for(options, sizes_for(options, "cpu"), **forms)
    cases = {(check.op, check.case) for check in checks}
    prefills = {case.heads for op, case in cases if op == "attention.sparse_prefill"}
    assert prefills == {8, 32}
    on_shards = [case for op, case in cases if op == "attention.sparse_decode" and case.lse]
    assert {(c.heads, c.window, c.window_format, c.sink) for c in on_shards} == {
        (16, 64, "v4_fp8", False)
    }
    assert ("attention.merge", MergeCase(8, 512)) in cases
    assert any(case.gives_scores for op, case in cases if op == "attention.index_topk_decode")


def test_without_a_plan_checks_are_of_what_layers_bind_on_the_device() -> None:
    options = VerifyOptions(model := "deepseek-v4-flash", entries=(256,))
    for device in ("cpu", "cuda"):
        forms, sizes = forms_of(model, device, None), sizes_for(options, device)
        ops = {check.op for check in checks_for(options, sizes, 4, **forms)}
        assert len(ops & {"linear.fp8_rows", "moe.experts_fp8_rows"}) == 2 * (device == "cuda")
        assert len(ops & {"linear.fp8_block", "moe.experts"}) == 2 * (device == "cpu")


def test_a_crash_or_a_hang_costs_its_own_piece_alone() -> None:
    found: dict[int, Any] = {}
    pieces = [(n, f"piece {n}") for n in range(6)]
    shares = [pieces[:5], pieces[5:], []]
    in_processes(fragile, "of", shares, found.__setitem__, found.__setitem__, longest_s=1.0)
    assert dict(sorted(found.items())) == {
        0: "result of piece 0",
        1: "ended its process with SIGSEGV",
        2: "result of piece 2",
        3: "did not end within 1 s",
        4: "result of piece 4",
        5: "result of piece 5",
    }


def test_what_the_time_does_not_reach_is_left() -> None:
    found: dict[int, Any] = {}
    shares = [[(3, "hangs"), (5, "is fine")]]
    told = found.__setitem__
    in_processes(fragile, "of", shares, told, told, until_s=time.monotonic())
    assert found == {}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the verb writes of pebble's attention part at a small size."""
    directory = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_record, "default_cache", lambda: directory / "cache")
        ran = metainfer(
            "verify", "--device", "cpu", "--part", "attention", "--entries", "256",
            "--prefill-rows", "8", "--decode-batches", "2", "--seed", "3", "--workers", "1",
            "--out", str(directory / "record.json"),
        )  # fmt: skip
    assert ran.code == 0, ran.out + ran.err
    assert "checks passed on" in ran.out
    assert "partial: sizes that verify takes by itself were left out" in ran.out
    (kept,) = (directory / "cache").iterdir()
    text = (directory / "record.json").read_text()
    assert json.loads(kept.read_text()) == json.loads(text)
    return read_record(text)


def test_the_verb_verifies_every_case_of_a_model(record: dict[str, Any]) -> None:
    assert record["failed"] == record["not_run"] == 0
    assert min(record["passed"], record["not_verified"]) > 0
    assert {case["op"] for case in record["cases"]} >= {
        "norm.rms_norm",
        "hc.mix",
        "attention.index_topk",
        "attention.sparse_prefill",
        "attention.sparse_decode",
    }
    assert not any(case["op"].startswith(("linear.", "moe.")) for case in record["cases"])
    for case in record["cases"]:
        assert case["state"] == ("not verified" if case["backend"] == "reference" else "passed")
        if case["state"] == "not verified":
            assert case["seconds"] is case["error"] is None
            continue
        assert case["seconds"] > 0
        assert case["floor_s"] > 0
        assert case["error"] <= max(case["tolerance"], 0.26)  # codes differ by a step at most
    decode = [case for case in record["cases"] if case["op"] == "attention.sparse_decode"]
    assert {case["tokens"] for case in decode} == {256, 1024, 4096}
    assert len(record["card"]["kernels"]) == 64
    assert record["rates"]["bytes_per_s"] > 0


def test_a_record_that_was_edited_is_refused(record: dict[str, Any]) -> None:
    edited = json.loads(json.dumps(record))
    edited["cases"][0]["seconds"] /= 2
    with pytest.raises(UserError, match="was changed after it was made"):
        read_record(json.dumps(edited))
    for text, message in (
        ("{", "not a JSON record"),
        ("{}", "not a record of metainfer verify"),
        (json.dumps(sign(record | {"version": 99})), "has version 99"),
    ):
        with pytest.raises(UserError, match=message):
            read_record(text)


def test_a_record_is_shown_unless_it_was_edited(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    ran = metainfer("verify", "--show", str(path))
    assert ran.code == 0
    assert f"sha256 {record['sha256']}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "below their floor" not in ran.out or any(
        case["floor_s"] > case["seconds"] for case in record["cases"] if case["seconds"]
    )

    beaten = json.loads(json.dumps(record))
    for case in beaten["cases"]:
        case["seconds"], case["floor_s"] = 1e-6, 2e-6 if case["phase"] == "decode" else 1e-7
    count = sum(case["phase"] == "decode" for case in beaten["cases"])
    path.write_text(json.dumps(sign(beaten)))
    ran = metainfer("verify", "--show", str(path))
    assert f"{count} of {len(beaten['cases'])} times lie below their floor" in ran.out
    assert 0 < count < len(beaten["cases"])

    failed = json.loads(json.dumps(record))
    failed["cases"][0] |= {"problem": "off by 3", "state": "failed"}
    failed["failed"] = 1
    path.write_text(json.dumps(sign(failed)))
    ran = metainfer("verify", "--show", str(path))
    assert ran.code == 1
    assert f"FAILED {record['cases'][0]['op']}" in ran.out
    assert "off by 3" in ran.out

    path.write_text(json.dumps(failed))
    ran = metainfer("verify", "--show", str(path))
    assert (ran.code, ran.out) == (2, "")
    assert "was changed after it was made" in ran.err


def kernel(case: Any, backend: str = "native") -> Kernel:
    return Kernel(OP, backend, case, partial(print), partial(print))


def test_what_passed_counts_for_its_card_and_versions_alone(
    record: dict[str, Any], tmp_path: Path
) -> None:
    one = norm_of(record)
    whole = sign(record | {"whole_sizes": True})

    def left(*kernels: Kernel) -> list[Kernel]:
        done = known(record["card"], "bfloat16", tmp_path)
        return list(unverified(kernels, done.passed).values())

    assert left(one) == [one]
    keep(whole, tmp_path)
    assert left(one, one) == []
    strange, other = kernel(RmsNormCase(999)), kernel(one.case, "other")
    assert left(one, strange, other, strange) == [strange, other]
    assert left(kernel(one.case, "reference")) == []
    assert not known(record["card"] | {"driver": "999"}, "bfloat16", tmp_path).passed
    assert not known(record["card"], "float32", tmp_path).passed

    keep(sign(with_state(whole, State.FAILED) | {"date": "9999-01-01"}), tmp_path)
    assert left(one) == [one]
    keep(sign(whole | {"date": "9999-02-01"}), tmp_path)
    assert left(one) == []
    keep(sign(record | {"date": "9999-03-01"}), tmp_path)
    assert left(one) == []


def norm_of(record: dict[str, Any]) -> Kernel:
    """A norm that passed."""
    (case, *_) = [case for case in record["cases"] if case["op"] == OP]
    return kernel(RmsNormCase(**case["case"]), case["backend"])


def with_state(record: dict[str, Any], state: State, most: int | None = None) -> dict[str, Any]:
    """The record with another outcome of the norms, or of so many of them."""
    changed: dict[str, Any] = json.loads(json.dumps(record))
    for case in [case for case in changed["cases"] if case["op"] == OP][:most]:
        case["state"] = state
    return changed


@pytest.mark.parametrize("what", ["small sizes", "cut short"])
def test_what_passed_in_part_does_not_count(
    record: dict[str, Any], tmp_path: Path, what: str
) -> None:
    partial = record
    if what == "cut short":
        partial = sign(with_state(record, State.NOT_RUN, most=1) | {"whole_sizes": True})
    keep(partial, tmp_path)
    done = known(record["card"], "bfloat16", tmp_path)
    (name,) = unverified([norm_of(record)], done.passed)
    assert name in done.partly
    assert bool(done.passed) == (what == "cut short")


def test_a_run_that_was_cut_short_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_record, "default_cache", lambda: tmp_path)
    ran = metainfer("verify", "--device", "cpu", "--budget", "1e-9", "--json")
    record = json.loads(ran.out)
    assert ran.code == 3
    assert record["passed"] == record["failed"] == 0
    assert record["not_run"] == len(record["cases"]) > 0
    assert record["partial"] == [f"{record['not_run']} of {record['not_run']} checks were not run"]
    (tmp_path / "cut.json").write_text(ran.out)
    ran = metainfer("verify", "--show", str(tmp_path / "cut.json"))
    assert ran.code == 3
    assert f"; {record['not_run']} were not run for want of time" in ran.out


def test_references_are_not_held_against_themselves() -> None:
    outcome = check(on_cpu(Backend(OP, "cpu", broken)), ONE, f"{OP}=reference", seed=5)
    assert (outcome.backend, outcome.state) == ("reference", State.NOT_VERIFIED)


def test_several_sequences_may_share_the_rows_of_a_prefill() -> None:
    op = "attention.sparse_prefill"
    for case in OPS[op].cases["pebble"]:
        outcome = check(platform("cpu"), Check(op, case, "prefill", Load(6, 300, 3)), "", seed=5)
        assert (outcome.backend, outcome.problem) == ("cpu", "")


def test_caches_have_the_format_of_the_plan() -> None:
    seen = []

    def looks(case: Any, *arguments: Any) -> Any:
        seen.append(arguments[4].dtype)
        raise RuntimeError("seen")

    attention = OPS["attention.sparse_decode"].cases["pebble"][1]
    one = Check("attention.sparse_decode", attention, "decode", Load(1, 512))
    on = on_cpu(Backend("attention.sparse_decode", "cpu", looks))
    for dtype in ("float32", "bfloat16", ""):
        check(on, one, "", seed=5, cache_dtype=dtype)
    assert seen == [torch.float32, torch.bfloat16, getattr(torch, attention.dtype)]


def test_a_record_that_was_edited_counts_for_nothing(
    record: dict[str, Any], tmp_path: Path
) -> None:
    path = keep(sign(record | {"whole_sizes": True}), tmp_path)
    assert known(record["card"], "bfloat16", tmp_path).passed
    path.write_text(path.read_text().replace('"problem": ""', '"problem": "x"', 1))
    assert not known(record["card"], "bfloat16", tmp_path).passed


def test_serve_says_when_kernels_never_passed(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_known, "default_cache", lambda: tmp_path)
    monkeypatch.setattr(verify_record, "card_facts", lambda machine, device: record["card"])

    def said(device: str) -> str:
        err = io.StringIO()
        terminal = Terminal(io.StringIO(), err, colour=False, live=False)
        plan: Any = SimpleNamespace(
            device=SimpleNamespace(value=device), plain_cache_dtype="bfloat16"
        )
        serve.say_unverified(terminal, probe(), plan, [norm_of(record)])
        return err.getvalue()

    assert said("cpu") == ""
    assert said("cuda:0").startswith("1 kernels in use never passed `metainfer verify`")
    keep(record, tmp_path)
    assert "1 passed in part: not run to the end, or at small sizes" in said("cuda:0")
    keep(sign(record | {"whole_sizes": True}), tmp_path)
    assert said("cuda:0") == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "cuda"), "torch sees no GPU"),
        (("--as", "sm_89", "--device", "cpu"), "a CPU does not run the code of sm_89"),
        (("no-such-model",), "there is no model at 'no-such-model'"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("pebble", "--plan", "/no/such/plan.json"), "no such file"),
        (("--plan", "plan.json"), "a plan does not name its model"),
    ],
)
def test_what_cannot_be_verified_is_refused(flags: tuple[str, ...], message: str) -> None:
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is one")
    ran = metainfer("verify", *flags)
    assert ran.code == 2
    assert message in ran.err


def test_names_of_code() -> None:
    assert parse_capability("sm_89") == (8, 9)
    assert parse_capability("sm_120") == (12, 0)
    with pytest.raises(UserError, match="'8.9' is no GPU's code name"):
        parse_capability("8.9")
    assert platform("cpu").name == "cpu"
