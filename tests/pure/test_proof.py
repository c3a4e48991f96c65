"""Verdicts of `bench quality` that let the plan keep caches as bytes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.families import read_arch
from metainfer.ops.kernel_order import COMPOSED
from metainfer.plan.caches import cache_dtypes
from metainfer.plan.plan import Origin
from metainfer.plan.proof import (
    LIMITS,
    CacheProof,
    Terms,
    cache_proof,
    judged,
    keep,
    model_key,
    too_short,
)
from metainfer.plan.settings import EngineSettings

PEBBLE = read_arch("pebble")
PROOF = CacheProof("fp8", "fp4", "it was seen", 1024)
HERE = Terms("cuda:sm_90", "bfloat16", "plain")
ALL_CHOSEN = 512  # tokens: 128 entries of 4


def side(latents: str, keys: str) -> dict[str, Any]:
    values = {
        "device": "cuda:0",
        "compute_dtype": "bfloat16",
        "activations": "plain",
        "weights_residency": "quantised",
        "cache_dtype": latents,
        "index_cache_dtype": keys,
    }
    plan = {name: {"value": value} for name, value in values.items()}
    return {"receipt": {"settings": {"load_format": "auto"}, "plan": plan}}


def record(keys: str = "fp8", date: str = "2025-06-01T10:00:00", passed: bool = True) -> Any:
    return {
        "date": date,
        "held_out": True,
        "machine": {"gpus": [{"capability": [9, 0]}]},
        "needles": {"count": 32},
        "longest": ALL_CHOSEN + 1,
        "divergence": {"tokens": 5000, "kl": 7.7e-4, "perplexity_rise": 7e-4, "top1": 0.98},
        "verdict": {"passed": passed, "thresholds": dict(LIMITS)},
        "sides": {"A": side("bfloat16", "bfloat16"), "B": side("fp8", keys)},
    }


def test_a_record_proves_the_formats_of_its_second_side() -> None:
    proof = judged(record("fp4"), PEBBLE)
    assert isinstance(proof, CacheProof)
    assert (proof.latents, proof.index_keys) == ("fp8", "fp4")
    assert "passed it on 2025-06-01: divergence 0.00077 nats a token" in proof.reason


@pytest.mark.parametrize(
    ("path", "value", "doubt"),
    [
        (("longest",), ALL_CHOSEN, "up to 512 tokens no index key decides anything"),
        (("needles", "count"), 0, "no needle was looked for"),
        (("held_out",), False, "drawn at random"),
        (("sides", "B", "receipt", "settings", "load_format"), "dummy", "drawn at random"),
        (("divergence", "tokens"), 2047, "2047 predicted tokens are fewer"),
        (("divergence", "tokens"), float("nan"), "nan predicted tokens are fewer"),
        (("divergence", "kl"), float("nan"), "passed with figures that do not pass"),
        (("divergence", "perplexity_rise"), 0.5, "passed with figures that do not pass"),
        (("divergence", "top1"), 0.5, "passed with figures that do not pass"),
        (("date",), "\x1b[2J", "its date is none"),
        (("verdict", "thresholds", "kl"), 0.05, "limits of kl are laxer"),
        (("verdict", "thresholds", "kl"), float("nan"), "limits of kl are laxer"),
        (("verdict", "thresholds", "top1"), 0.9, "limits of top1 are laxer"),
        (
            ("sides", "B", "receipt", "plan", "activations", "value"),
            "fp8",
            "differ in activations too",
        ),
        (("sides", "A", "receipt", "plan", "cache_dtype", "value"), "fp8", "against plain ones"),
        (("sides", "B", "receipt", "plan", "cache_dtype", "value"), "fp3", "no caches in fp3"),
    ],
)
def test_a_record_about_something_else_proves_nothing(path, value, doubt) -> None:
    changed = copy.deepcopy(record())
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    found = judged(changed, PEBBLE)
    assert isinstance(found, str)
    assert doubt in found


def test_equal_sides_prove_nothing_and_stricter_limits_do() -> None:
    equal = {
        **record(),
        "sides": {"A": side("bfloat16", "bfloat16")} | {"B": side("bfloat16", "float32")},
    }
    assert "does not hold caches of bytes" in judged(equal, PEBBLE)
    strict = record()
    strict["verdict"]["thresholds"] = {
        "kl": 0.0,
        "perplexity_rise": 0.0,
        "top1": 1,
        "recall_loss": 0,
    }
    assert isinstance(judged(strict, PEBBLE), CacheProof)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"12345")
    return directory


def test_the_latest_verdict_on_a_pair_of_formats_counts(model: Path, tmp_path: Path) -> None:
    kept, settings = tmp_path / "kept", EngineSettings()
    key = model_key(model, settings)

    def found() -> str | None:
        proof = cache_proof(model, PEBBLE, settings, HERE, kept)
        return None if proof is None else proof.index_keys

    assert found() is None
    keep(record("fp8", "2025-06-01"), key, kept)
    assert found() == "fp8"
    keep(record("fp4", "2025-06-02"), key, kept)
    assert found() == "fp4"
    keep(record("fp4", "2025-06-03", passed=False), key, kept)
    assert found() == "fp8"
    (kept / f"{key}-1.json").write_text("{")
    (kept / f"{key}-2.json").write_text(json.dumps({"date": "2025-06-04"}))
    (kept / f"{key}-3.json").write_text("[" * 100_000)
    assert found() == "fp8"
    keep(record("fp8", "2025-06-05", passed=False), key, kept)
    assert found() is None


def test_a_verdict_counts_on_such_a_device_in_such_formats(model: Path, tmp_path: Path) -> None:
    kept, settings = tmp_path / "kept", EngineSettings()
    key = model_key(model, settings)
    on_cpu = record(date="2025-06-02", passed=False)
    for name in ("A", "B"):
        on_cpu["sides"][name]["receipt"]["plan"]["device"]["value"] = "cpu"
    keep(record(), key, kept)
    keep(on_cpu, key, kept)  # later, and of another device
    assert cache_proof(model, PEBBLE, settings, HERE, kept) is not None
    for other in (
        Terms("cpu", "bfloat16", "plain"),
        Terms("cuda:sm_100", "bfloat16", "plain"),
        Terms("cuda:sm_90", "float32", "plain"),
        Terms("cuda:sm_90", "bfloat16", "fp8"),
    ):
        assert cache_proof(model, PEBBLE, settings, other, kept) is None


def test_a_much_longer_context_than_was_judged_is_said() -> None:
    assert too_short(1024, 4095) == ""
    said = "judged on prompts of up to 1,024 tokens; this plan's context is 1,048,576"
    assert too_short(1024, 2**20) == said


def test_another_checkpoint_or_part_of_it_has_no_verdict(model: Path, tmp_path: Path) -> None:
    kept, settings = tmp_path / "kept", EngineSettings()
    keep(record(), model_key(model, settings), kept)
    cut = EngineSettings(hf_overrides={"num_hidden_layers": 2})
    assert cache_proof(model, PEBBLE, cut, HERE, kept) is None
    dummy = EngineSettings(load_format="dummy")
    assert cache_proof(model, PEBBLE, dummy, HERE, kept) is None
    assert cache_proof(Path("deepseek-v4-flash"), PEBBLE, settings, HERE, kept) is None
    assert cache_proof(model, PEBBLE, settings, HERE, kept) is not None
    (model / "model.safetensors").write_bytes(b"12346")
    assert cache_proof(model, PEBBLE, settings, HERE, kept) is None
    (model / "model.safetensors").write_bytes(b"123456")
    assert cache_proof(model, PEBBLE, settings, HERE, kept) is None


def test_a_verdict_that_others_may_have_written_does_not_count(model: Path, tmp_path: Path) -> None:
    kept, settings = tmp_path / "kept", EngineSettings()
    keep(record(), model_key(model, settings), kept)
    assert kept.stat().st_mode & 0o077 == 0
    kept.chmod(0o770)
    assert cache_proof(model, PEBBLE, settings, HERE, kept) is None
    kept.chmod(0o700)
    assert cache_proof(model, PEBBLE, settings, HERE, kept) is not None


def test_weights_that_were_trained_on_are_another_checkpoint(model: Path) -> None:
    weights = bytearray(100_000)
    path = model / "model.safetensors"
    path.write_bytes(weights)
    first = model_key(model, EngineSettings())
    assert model_key(model, EngineSettings()) == first
    for place in (12_000, 50_000 - 1, 100_000 - 1):
        path.write_bytes(weights[:place] + b"1" + weights[place + 1 :])
        assert model_key(model, EngineSettings()) != first


@pytest.mark.parametrize(
    ("flags", "proof", "expected"),
    [
        ({}, None, ("float32", Origin.DEFAULT, "float32", Origin.DEFAULT)),
        ({}, PROOF, ("fp8", Origin.MEASURED, "fp4", Origin.MEASURED)),
        (
            {"kv_cache_dtype": "bfloat16"},
            PROOF,
            ("bfloat16", Origin.FLAG, "bfloat16", Origin.DEFAULT),
        ),
        ({"kv_cache_dtype": "fp8"}, None, ("fp8", Origin.FLAG, "fp8", Origin.DEFAULT)),
        ({"kv_cache_dtype": "fp8"}, PROOF, ("fp8", Origin.FLAG, "fp4", Origin.MEASURED)),
        ({"index_cache_dtype": "fp8"}, PROOF, ("float32", Origin.DEFAULT, "fp8", Origin.FLAG)),
        ({"index_cache_dtype": "fp4"}, PROOF, ("fp8", Origin.MEASURED, "fp4", Origin.FLAG)),
        (
            {"kernel_order": f"*={COMPOSED}"},
            PROOF,
            ("float32", Origin.DEFAULT, "float32", Origin.DEFAULT),
        ),
    ],
)
def test_flags_win_then_verdicts(flags, proof, expected) -> None:
    latents, keys = cache_dtypes(EngineSettings(**flags), "float32", proof)
    assert (latents.value, latents.origin, keys.value, keys.origin) == expected
    if Origin.MEASURED in expected:
        assert PROOF.reason in (latents.reason, keys.reason)
