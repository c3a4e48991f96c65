"""Dummy checkpoints: drawn by name, in the released formats, without files; layers cut at load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.manifest import MTP_PREFIX, iterate
from metainfer.arch.record import LayerKind, RouterKind
from metainfer.arch.tiny import tiny_arch, tiny_config, tiny_quantised_arch
from metainfer.core.errors import CheckpointError, UserError
from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import SamplingParams
from metainfer.plan.settings import EngineSettings, parse_overrides
from metainfer.weights.dummy import DummyCheckpoint
from metainfer.weights.formats import Fp4GroupWeight, Fp8BlockWeight
from metainfer.weights.load import Checkpoint
from metainfer.weights.synth import write_checkpoint
from tests.fakes.command import metainfer

ARCH = tiny_quantised_arch()


def test_every_tensor_has_the_format_and_the_spread_of_a_written_checkpoint(
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(tmp_path / "written", ARCH)
    dummy = DummyCheckpoint(ARCH, "cpu")
    assert dummy.unused == ()
    with Checkpoint.open(directory, ARCH) as written:
        for spec in iterate(ARCH):
            if spec.name.startswith(MTP_PREFIX):
                continue
            ours, theirs = dummy.tensor(spec.name), written.tensor(spec.name)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), spec.name
            if ours.is_floating_point() and ours.numel() >= 4096:
                a, b = float(ours.float().std()), float(theirs.float().std())
                assert a == pytest.approx(b, rel=0.1), spec.name


def test_a_tensor_follows_from_name_and_seed_alone() -> None:
    one, other = DummyCheckpoint(ARCH, "cpu"), DummyCheckpoint(ARCH, "cpu")
    name = "layers.2.attn.wq_b.weight"
    other.tensor("embed.weight")
    bits = one.tensor(name).view(torch.uint8)
    assert torch.equal(bits, other.tensor(name).view(torch.uint8))
    changed = DummyCheckpoint(ARCH, "cpu", seed=1).tensor(name).view(torch.uint8)
    sibling = one.tensor("layers.3.attn.wq_b.weight").view(torch.uint8)
    for different in (changed, sibling):
        assert (bits == different).float().mean() < 0.05


def test_stacked_experts_are_the_single_ones_and_weights_have_unit_gain() -> None:
    dummy = DummyCheckpoint(ARCH, "cpu")
    prefix = "layers.1.ffn.experts"
    w1, w2, _ = dummy.experts(prefix, [0, 5, 3])
    assert isinstance(w1, Fp4GroupWeight)
    for weight, matrix in ((w1, "w1"), (w2, "w2")):
        single = dummy.weight(f"{prefix}.5.{matrix}").dequantise(torch.float32)
        assert torch.equal(weight.expert(1).dequantise(torch.float32), single)
        assert float(single.std()) * single.shape[1] ** 0.5 == pytest.approx(1.0, rel=0.15)
    query = dummy.weight("layers.0.attn.wq_b")
    assert isinstance(query, Fp8BlockWeight)
    assert float(query.dequantise(torch.float32).std()) * 128**0.5 == pytest.approx(1.0, rel=0.3)


def test_tables_name_distinct_experts() -> None:
    table_VK = DummyCheckpoint(ARCH, "cpu").expert_table("layers.0.ffn.gate.tid2eid")
    assert all(len(set(row)) == len(row) for row in table_VK.tolist())
    counts = table_VK.flatten().bincount(minlength=ARCH.num_experts)
    assert counts.min() > 0


def test_ranks_have_slices_of_the_whole() -> None:
    arch = tiny_arch()
    whole = DummyCheckpoint(arch, "cpu")
    second = DummyCheckpoint(arch, "cpu", rank=1, size=2)
    name = "layers.0.attn.wq_b.weight"
    assert torch.equal(second.tensor(name), whole.tensor(name).chunk(2)[1])
    for ours, all_of_it, dimension in zip(
        second.experts("layers.1.ffn.experts", [2, 4]),
        whole.experts("layers.1.ffn.experts", [2, 4]),
        (1, 2, 1),
        strict=True,
    ):
        expected = all_of_it.dequantise(torch.float32).chunk(2, dimension)[1]
        assert torch.equal(ours.dequantise(torch.float32), expected)


def test_progress_counts_every_byte_once() -> None:
    seen: list[tuple[int, int]] = []
    dummy = DummyCheckpoint(ARCH, "cpu", on_progress=lambda done, total: seen.append((done, total)))
    for spec in iterate(ARCH):
        if not spec.name.startswith(MTP_PREFIX) and ".experts." not in spec.name:
            dummy.tensor(spec.name)
    for layer in ARCH.layers:
        for _ in range(2):
            dummy.experts(f"layers.{layer.index}.ffn.experts", range(ARCH.num_experts))
    done, total = seen[-1]
    assert (
        done
        == total
        == sum(spec.nbytes for spec in iterate(ARCH) if not spec.name.startswith(MTP_PREFIX))
    )


def test_fewer_layers_are_the_first_ones() -> None:
    whole, cut = (
        read_arch("deepseek-v4-flash"),
        read_arch("deepseek-v4-flash", {"num_hidden_layers": 4, "vocab_size": 32768}),
    )
    assert cut.layers == whole.layers[:4]
    assert cut.vocab_size == 32768
    assert (cut.num_mtp_layers, cut.num_dspark_stages) == (0, 0)
    assert [layer.kind for layer in cut.layers] == [
        LayerKind.SLIDING, LayerKind.SLIDING,
        LayerKind.COMPRESSED_SPARSE, LayerKind.HEAVILY_COMPRESSED,
    ]  # fmt: skip
    two = read_arch("deepseek-v4-flash", {"num_hidden_layers": 2})
    assert [layer.router for layer in two.layers] == [RouterKind.HASH] * 2
    ratios = [0, 4, 128, 4]
    named = read_arch("deepseek-v4-flash", {"num_hidden_layers": 4, "compress_ratios": ratios})
    assert [layer.ratio for layer in named.layers] == ratios
    merged = read_arch("deepseek-v4-flash", {"rope_scaling": {"factor": 4}})
    assert merged.yarn is not None
    assert whole.yarn is not None
    assert (merged.yarn.factor, merged.yarn.beta_fast) == (4.0, whole.yarn.beta_fast)


@pytest.mark.parametrize("count", [0, 44, "4", True])
def test_layers_that_the_model_does_not_have_are_refused(count: object) -> None:
    with pytest.raises(UserError, match="of deepseek-v4-flash, which has 43"):
        read_arch("deepseek-v4-flash", {"num_hidden_layers": count})


def test_overrides_are_a_json_object() -> None:
    assert parse_overrides('{"a": [1]}') == {"a": [1]}
    for text, why in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        with pytest.raises(UserError, match=why):
            parse_overrides(text)


def test_an_engine_runs_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    settings = EngineSettings(
        load_format="dummy", hf_overrides={"num_hidden_layers": 4}, device="cpu",
        num_blocks_override=4, max_num_seqs=2, threads=1,
    )  # fmt: skip
    answers = []
    for _ in range(2):
        with Engine.load(tmp_path, settings, check_every_step=True) as engine:
            assert len(engine.arch.layers) == 4
            sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            (result,) = generate(engine, [list(range(20, 60))], sampling)
            answers.append(result.token_ids)
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]


def test_the_first_layers_of_a_checkpoint_can_be_run(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "whole", tiny_config())
    settings = EngineSettings(
        hf_overrides={"num_hidden_layers": 3}, device="cpu", num_blocks_override=4, threads=1
    )
    with Engine.load(directory, settings) as engine:
        assert engine.arch.num_layers == 3
        (result,) = generate(engine, [[20, 21, 22]], SamplingParams(temperature=0.0, max_tokens=2))
    assert len(result.token_ids) == 2
    with pytest.raises(CheckpointError, match="surplus"):
        Checkpoint.open(directory, read_arch(directory, {"num_hidden_layers": 3}))


def test_serving_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    for model in (str(tmp_path), "deepseek-v4-flash"):
        ran = metainfer("run", model, "--load-format", "dummy", "--prompt", "Hello")
        assert ran.code == 2
        assert f"{model} has no tokenizer.json" in ran.err
        assert "copy a tokenizer next to its config.json" in ran.err
