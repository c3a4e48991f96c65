"""The report of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer.arch.manifest import total_bytes
from metainfer.arch.tiny import tiny_arch, tiny_config, tiny_quantised_arch, tiny_quantised_config
from metainfer.weights.check import check_checkpoint
from metainfer.weights.index import SINGLE_NAME
from metainfer.weights.synth import write_checkpoint


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", tiny_quantised_config())


def test_good_checkpoint(quantised: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = check_checkpoint(quantised, deep=True, progress=lambda *call: calls.append(call))
    total = total_bytes(tiny_quantised_arch())
    assert report.ok
    assert (report.model, report.num_files, report.num_bytes) == ("model", 1, total)
    assert calls[-1] == (total, total)
    groups = {group.group: group for group in report.groups}
    assert sum(group.num_bytes for group in report.groups) == total
    assert sum(group.num_tensors for group in report.groups) == report.num_tensors
    assert groups["routed experts"].formats == ("F8_E8M0", "I8")
    assert groups["routed experts"].num_tensors == 5 * 8 * 3 * 2
    assert groups["shared experts"].formats == ("F8_E4M3", "F8_E8M0")
    assert groups["head"].num_tensors == 1
    assert groups["mtp (unused)"].num_tensors > 0
    assert "other" not in groups
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_deep_finds_values_that_no_model_can_mean(quantised: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(quantised / SINGLE_NAME).items()}
    tensors["layers.0.attn.wq_a.scale"].view(torch.uint8)[0, 0] = 255
    tensors["layers.1.attn.wkv.weight"].view(torch.uint8)[3, 4] = 0xFF
    tensors["layers.2.ffn.experts.1.w3.scale"].view(torch.uint8)[5] = 255
    tensors["norm.weight"][7] = float("nan")
    tensors["layers.0.hc_attn_fn"][0, :2] = float("-inf")
    tensors["layers.0.ffn.gate.tid2eid"][0, 0] = 8
    save_file(tensors, quantised / SINGLE_NAME)
    assert check_checkpoint(quantised).ok
    report = check_checkpoint(quantised, deep=True)
    assert {problem.kind for problem in report.problems} == {"value"}
    assert sorted(problem.text for problem in report.problems) == [
        "layers.0.attn.wq_a.scale has NaN or infinite values (1)",
        "layers.0.ffn.gate.tid2eid names experts that do not exist (1 times)",
        "layers.0.hc_attn_fn has NaN or infinite values (2)",
        "layers.1.attn.wkv.weight has NaN or infinite values (1)",
        "layers.2.ffn.experts.1.w3.scale has NaN or infinite values (8)",
        "norm.weight has NaN or infinite values (1)",
    ]


def test_problems_are_reported_not_raised(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config())
    (directory / "config.json").write_text(json.dumps(tiny_config(hidden_size=96)))
    report = check_checkpoint(directory)
    assert not report.ok
    assert {problem.kind for problem in report.problems} == {"shape"}

    (directory / "config.json").unlink()
    report = check_checkpoint(directory, deep=True)
    assert report.model is None
    assert [problem.kind for problem in report.problems] == ["config"]
    assert report.num_bytes == total_bytes(tiny_arch())

    path = directory / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    assert {problem.kind for problem in check_checkpoint(directory).problems} == {"config", "file"}
    path.unlink()
    report = check_checkpoint(directory)
    assert (report.num_files, report.groups) == (0, ())
    assert [problem.kind for problem in report.problems] == ["config", "file"]


def test_unknown_dtypes_are_reported(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config())
    tensors = load_file(directory / SINGLE_NAME)
    tensors["norm.weight"] = tensors["norm.weight"].double()
    save_file(tensors, directory / SINGLE_NAME)
    report = check_checkpoint(directory, deep=True)
    texts = [problem.text for problem in report.problems]
    assert texts[0] == "norm.weight is F64, not F32"
    assert "norm.weight cannot be read" in texts[1]
