"""`profile`: which kernels ran, how often and on how many rows; record, table, picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.bench.plot_profile import draw_profile
from metainfer.bench.profile import Meter, Profile, profiles
from metainfer.bench.profile_report import record, text_report
from metainfer.bench.profile_settings import ProfileLoad
from metainfer.bench.watched import Watched
from metainfer.core.errors import UserError
from metainfer.llm.engine import LoadedModel, load_model
from metainfer.ops.floor import Rates
from metainfer.plan.settings import EngineSettings
from tests.fakes.command import metainfer

LOAD = ProfileLoad(prefill_tokens=150, decode_batches=(1, 3), decode_context=140, repeats=2)
SETTINGS = EngineSettings(
    load_format="dummy", device="cpu", threads=1, max_model_len=256, max_num_seqs=3,
    max_num_batched_tokens=64, num_blocks_override=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profile")
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    return directory


@pytest.fixture(scope="module")
def run(model: Path) -> tuple[LoadedModel, list[Profile]]:
    meter = Meter("cpu")
    loaded = load_model(model, SETTINGS, watched=lambda registry: Watched(registry, meter))
    return loaded, profiles(loaded, meter, LOAD, lambda _: None)


def test_each_bound_kernel_is_counted_in_its_phase(
    run: tuple[LoadedModel, list[Profile]],
) -> None:
    loaded, (prefill, one, three) = run
    assert [(p.phase, p.rows, p.tokens) for p in (prefill, one, three)] == [
        ("prefill", 150 - 2 * 64, 150), ("decode", 1, 141), ("decode", 3, 141),
    ]  # fmt: skip
    bound = Counter(kernel.op for kernel in loaded.kernels)
    for profile in (prefill, one, three):
        calls: Counter[str] = Counter()
        for op in profile.ops:
            calls[op.called.op] += op.calls
        for name in ("moe.experts", "hc.expand", "linear.grouped", "hc.head"):
            assert calls[name] == bound[name], (profile.phase, name)
        other = "sparse_decode" if profile.phase == "prefill" else "sparse_prefill"
        assert not calls[f"attention.{other}"]
        assert calls["attention.sparse_prefill"] + calls["attention.sparse_decode"] == 5
        assert calls["sample.draw"] == 1
    rows: dict[str, set[int]] = {}
    for op in prefill.ops:
        rows.setdefault(op.called.op, set()).add(op.load.rows)
    # The last layer runs for the row alone that is read.
    assert rows["moe.experts"] == {22, 1}
    assert max(rows["attention.sparse_prefill"]) == 22
    assert rows["sample.draw"] == {1}
    assert {op.load.rows for op in three.ops} == {3}
    times = [op.median_s for op in three.ops]
    assert times == sorted(times, reverse=True)
    assert all(len(op.seconds) == len(three.step_s) == LOAD.repeats for op in three.ops)


def test_the_record_tells_floors_and_is_drawn(run: tuple[LoadedModel, list[Profile]]) -> None:
    loaded, found = run
    rates = Rates(1e10, {"float32": 5e10, "bfloat16": 5e10}, 1e-7)
    made = record(found, loaded, LOAD, "tiny", rates)
    for step in made["steps"]:
        assert step["ops_s"] == pytest.approx(sum(op["seconds"] for op in step["ops"]))
        assert all(op["floor_s"] >= op["calls"] * 1e-7 for op in step["ops"])
        assert all(op["low_s"] <= op["seconds"] <= op["high_s"] for op in step["ops"])
    text = text_report(made)
    assert "math" in text and "opera " not in text  # what sets a floor is a whole word
    assert "decode, 3 rows, 141 tokens; times in us" in text
    assert "the step as the host sees it" in text
    ids = {element.get("id", "") for element in ET.fromstring(draw_profile(made)).iter()}
    assert {"step-0", "step-1", "step-2"} <= ids
    assert json.loads(json.dumps(made, default=str))["kind"] == "profile"


def test_a_meter_that_is_off_notes_nothing(model: Path) -> None:
    meter = Meter("cpu")
    loaded = load_model(model, SETTINGS, watched=lambda registry: Watched(registry, meter))
    plain = load_model(model, SETTINGS)
    assert [(k.op, k.backend) for k in loaded.kernels] == [(k.op, k.backend) for k in plain.kernels]
    assert meter.take() == {}


def test_the_verb_writes_record_and_picture(tmp_path: Path, model: Path) -> None:
    ran = metainfer(
        "profile", str(model), "--load-format", "dummy", "--device", "cpu", "--threads", "1",
        "--layers", "3", "--setting", "generic", "--input-len", "40", "--decode-context", "20",
        "--decode-batches", "2", "--repeats", "1", "--save-result", "--result-dir", str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    made = json.loads((tmp_path / "profile.json").read_text())
    assert made["arch"]["layers"] == 3
    backends = {
        op["backend"] for op in made["steps"][0]["ops"] if not op["op"].startswith("sample")
    }
    assert backends == {"composed"}
    assert (tmp_path / "profile.svg").is_file()
    with pytest.raises(UserError, match="--repeats must be at least 1"):
        ProfileLoad(repeats=0)
