"""`--plan FILE`: what `metainfer plan -o FILE` chose, as settings of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.families import read_arch
from metainfer.core.errors import UserError
from metainfer.hardware.known import machine_of
from metainfer.ops.base import Target
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.plan.build import build_plan
from metainfer.plan.plan import Origin, Plan
from metainfer.plan.plan_file import Settled, settle
from metainfer.plan.settings import EngineSettings
from tests.fakes.command import metainfer
from tests.fakes.machines import make_machine

BOX = "rtx-pro-6000-x4"
ARCH = read_arch("pebble")
Layout = dict[str, Any]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Of the shipped model on four cards."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    assert metainfer("plan", "--machine", BOX, "-o", str(file)).code == 0
    read: Layout = json.loads(file.read_text(encoding="utf-8"))
    return read


@pytest.fixture
def write(record: Layout, tmp_path: Path) -> Callable[..., str]:
    """A file with another layout or other values; its path."""

    def written(prefill: Layout | None = None, decode: Layout | None = None, **other: Any) -> str:
        chosen = record["chosen"]
        one = dict.fromkeys(chosen["decode"], 1)
        chosen = {
            **chosen,
            "prefill": {**one, **(prefill or decode or {})},
            "decode": {**one, **(decode or {})},
        }
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({**record, "chosen": chosen, **other}), encoding="utf-8")
        return str(path)

    return written


def settled(file: str, machine: str = BOX, **given: Any) -> Settled:
    return settle(EngineSettings(plan=file, **given), ARCH, machine_of(machine))


def on_cpu(found: Settled) -> Plan:
    able = Capabilities(
        Target("cpu"), dict.fromkeys(OPS, ("reference",)), ("reference",), frozenset()
    )
    with found.naming():
        return found.told(build_plan(make_machine(), ARCH, found.settings, able))


def test_the_layout_and_the_sizes_are_taken(write: Callable[..., str]) -> None:
    file = write({"context": 2}, {"tensor": 2})
    found = settled(file)
    assert found.warnings == () and found.settings.plan is None
    assert found.settings.tensor_parallel_size == 2
    assert found.settings.prefill_context_parallel_size == 2
    plan = on_cpu(found)
    for name, value in (
        ("tensor_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("max_model_len", 3072),
        ("max_num_seqs", 8),
        ("max_num_batched_tokens", 4096),
        ("cache_dtype", "bfloat16"),
    ):
        chosen = getattr(plan, name)
        assert chosen.value == value and chosen.origin is Origin.FILE, name
        assert file in chosen.reason
    assert plan.max_queued_requests.origin is Origin.DEFAULT
    assert Plan.from_json(plan.to_json()) == plan


def test_flags_beside_it_win(write: Callable[..., str]) -> None:
    found = settled(write(), max_model_len=512, kv_cache_dtype="float32", tensor_parallel_size=1)
    plan = on_cpu(found)
    assert (plan.max_model_len.value, plan.max_model_len.origin) == (512, Origin.FLAG)
    assert plan.cache_dtype.reason == "given with --kv-cache-dtype"
    assert plan.max_num_seqs.origin is Origin.FILE


@pytest.mark.parametrize(
    ("layout", "given", "sentence", "hint"),
    [
        ({"tensor": 2}, {"tensor_parallel_size": 4}, "--tensor-parallel-size 4 contradicts", "one"),
        (
            {"tensor": 2},
            {"prefill_context_parallel_size": 2},
            "--prefill-context-parallel-size 2 contradicts the layout of",
            "leave one",
        ),
        ({"replicas": 2}, {}, "plans 2 replicas (2 x 1 GPU)", "--emit metainfer"),
    ],
)
def test_contradictions_are_one_sentence(
    write: Callable[..., str], layout: Layout, given: Layout, sentence: str, hint: str
) -> None:
    with pytest.raises(UserError) as refused:
        settled(write(decode=layout), **given)
    assert sentence in refused.value.message and hint in (refused.value.hint or "")
    assert ". " not in refused.value.message


def test_another_model_is_refused_and_a_renamed_one_is_not(write: Callable[..., str]) -> None:
    other = replace(ARCH, name="gravel")
    machine = machine_of(BOX)
    assert settle(EngineSettings(plan=write()), other, machine).warnings == ()
    with pytest.raises(UserError, match="is a plan for boulder, and the model is pebble"):
        settled(write(model="boulder", model_key="1"))
    (said,) = settled(write(model_key="1")).warnings
    assert "another config" in said


def test_another_machine_is_warned_of(write: Callable[..., str]) -> None:
    (said,) = settled(write(), "rtx-pro-6000-x2").warnings
    assert "was made for 4 x NVIDIA RTX PRO 6000" in said and "this machine is not" in said
    box = machine_of(BOX)
    (said,) = settle(EngineSettings(plan=write()), ARCH, replace(box, driver="1.2")).warnings
    assert "other links, host or driver" in said


def test_errors_behind_it_name_the_file(write: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"plan\.json: --tensor-parallel-size 3") as refused:
        on_cpu(settled(write(decode={"tensor": 3})))
    assert "3" in refused.value.message.split("(")[0]


def test_what_is_not_done_is_said(write: Callable[..., str], record: Layout) -> None:
    formats = {**record["chosen"]["formats"], "draft": 2, "wire": "fp8"}
    file = write(engine="stock")
    told = json.loads(Path(file).read_text(encoding="utf-8"))
    told["chosen"]["formats"] = formats
    Path(file).write_text(json.dumps(told), encoding="utf-8")
    said = " ".join(settled(file).warnings)
    for part in ("drafting 2 tokens", "efficiency of stock"):
        assert part in said
    assert settled(file).settings.wire_dtype == "fp8"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nonsense", "is not a JSON record"),
        ("[]", "is not a JSON record"),
        ('{"kind": "comparison"}', "holds no layout plan (kind: comparison)"),
        ('{"version": 1, "values": {}}', "holds no layout plan (kind: an engine's plan)"),
        ('{"kind": "layout plan", "version": 9}', "has version 9, this engine reads 1"),
        ('{"kind": "layout plan", "version": 1}', "is not as `metainfer plan` writes it"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        settled(str(path))
    assert sentence in refused.value.message and refused.value.hint


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match="--plan: nowhere.json: no such file"):
        settled("nowhere.json")
