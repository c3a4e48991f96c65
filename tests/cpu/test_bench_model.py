"""`bench model`: names in transformers, turns, ratios, agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.arch.families import arch_from_config
from metainfer.arch.tiny import tiny_config
from metainfer.bench.contender import ENGINE, Timing
from metainfer.bench.model import SideResult, works
from metainfer.bench.model_report import agreement, leading_equal, record, text_report
from metainfer.bench.model_settings import ModelLoad, parse_batches
from metainfer.bench.peer_transformers import PeerSession, load_peer, peer_name
from metainfer.bench.traffic import Served, draw_prompts
from metainfer.bench.worker import Cards, answer, peak_memory_bytes
from metainfer.core.errors import UserError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.nvml import Nvml
from metainfer.weights.load import Checkpoint
from metainfer.weights.synth import write_checkpoint
from tests.fakes.nvml import FakeCard, FakeLibrary


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("peer") / "tiny", tiny_config(), seed=3)


@pytest.mark.parametrize(
    ("released", "in_transformers"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("layers.3.hc_ffn_scale", "model.layers.3.ffn_hc.scale"),
        ("layers.0.attn.attn_sink", "model.layers.0.self_attn.sinks"),
        ("layers.0.attn.kv_norm.weight", "model.layers.0.self_attn.kv_norm.weight"),
        (
            "layers.2.attn.compressor.norm.weight",
            "model.layers.2.self_attn.compressor.kv_norm.weight",
        ),
        ("layers.2.attn.compressor.ape", "model.layers.2.self_attn.compressor.position_bias"),
        (
            "layers.2.attn.indexer.compressor.wgate.weight",
            "model.layers.2.self_attn.compressor.indexer.gate_proj.weight",
        ),
        (
            "layers.2.attn.indexer.weights_proj.weight",
            "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
        ),
        ("layers.1.ffn.gate.bias", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("layers.1.ffn.gate.weight", "model.layers.1.mlp.gate.weight"),
        (
            "layers.1.ffn.shared_experts.w2.weight",
            "model.layers.1.mlp.shared_experts.down_proj.weight",
        ),
    ],
)  # fmt: skip
def test_names_in_transformers(released: str, in_transformers: str) -> None:
    assert peer_name(released) == in_transformers


def test_the_peer_takes_every_weight_and_its_cache_is_consistent(tiny_checkpoint: Path) -> None:
    arch = arch_from_config(tiny_config(), "tiny")
    with Checkpoint.open(tiny_checkpoint, arch) as checkpoint:
        model = load_peer(tiny_checkpoint, checkpoint, torch.float32)
        head = checkpoint.tensor("head.weight")
        experts = checkpoint.experts("layers.1.ffn.experts", [0, 5])
    assert torch.equal(model.lm_head.weight, head)
    stacked = model.model.layers[1].mlp.experts
    inner = arch.moe_intermediate_size
    assert torch.equal(
        stacked.gate_up_proj[5, :inner], experts[0].expert(1).dequantise(torch.float32)
    )
    assert torch.equal(
        stacked.gate_up_proj[5, inner:], experts[2].expert(1).dequantise(torch.float32)
    )
    assert torch.equal(stacked.down_proj[0], experts[1].expert(0).dequantise(torch.float32))
    prompt = draw_prompts("x", 1, 40, arch.vocab_size)
    whole = PeerSession(model).step(torch.tensor(prompt))
    session = PeerSession(model)
    session.step(torch.tensor(prompt)[:, :33])
    stepwise = [session.step(torch.tensor(prompt)[:, n : n + 1]) for n in range(33, 40)]
    assert torch.allclose(whole, stepwise[-1], atol=1e-5)
    greedy = PeerSession(model).greedy(prompt[0], 3)
    assert greedy[0] == int(whole.argmax())
    assert len(greedy) == 3


def test_what_transformers_keeps_in_fp32_stays_so(tiny_checkpoint: Path) -> None:
    with Checkpoint.open(tiny_checkpoint, arch_from_config(tiny_config(), "tiny")) as checkpoint:
        model = load_peer(tiny_checkpoint, checkpoint, torch.bfloat16)
    layer = model.model.layers[2]
    assert layer.self_attn.q_a_proj.weight.dtype is torch.bfloat16
    assert layer.self_attn.sinks.dtype is torch.float32
    assert layer.attn_hc.fn.dtype is torch.float32
    assert layer.input_layernorm.weight.dtype is torch.float32
    assert torch.isfinite(PeerSession(model).step(torch.tensor([[5, 6, 7]]))).all()


def side(name: str, dtype: str, rates: dict[str, list[float]], peak: int) -> SideResult:
    timings = {
        work: tuple(Timing(100, 100 / rate) for rate in per_round)
        for work, per_round in rates.items()
    }
    return SideResult(name, dtype, timings, 50_000_000, peak, ((1, 2, 3), (4, 5, 6)))


def test_the_faster_peer_is_the_peer_and_ratios_are_by_round() -> None:
    load = ModelLoad(decode_batches=(1,), rounds=3)
    prefill, decode = (work.name for work in works(load))
    assert (prefill, decode) == ("prefill 2048", "decode batch 1")
    sides = [
        side(ENGINE, "bfloat16", {prefill: [30.0, 60.0, 90.0], decode: [10.0] * 3}, 90 << 20),
        side("float32", "float32", {prefill: [1.0, 2.0, 3.0], decode: [4.0] * 3}, 200 << 20),
        side("bfloat16", "bfloat16", {prefill: [10.0, 30.0, 30.0], decode: [2.0] * 3}, 190 << 20),
    ]
    made = record(sides, load, "pebble", 2, {"cpu": "x"})
    first, second = made["works"]
    assert (first["peer"], first["engine_tokens_per_s"], first["peer_tokens_per_s"]) == (
        "bfloat16", pytest.approx(60.0), pytest.approx(30.0),
    )  # fmt: skip
    assert (first["ratio_low"], first["ratio"], first["ratio_high"]) == (
        pytest.approx(2.0), pytest.approx(3.0), pytest.approx(3.0),
    )  # fmt: skip
    assert (second["peer"], second["ratio"]) == ("float32", pytest.approx(2.5))
    assert json.loads(json.dumps(made, allow_nan=False, default=str))["threads"] == 2
    text = text_report(made)
    assert max(map(len, text.splitlines())) <= 100
    assert "peak memory, MB" in text
    assert "equal leading greedy tokens with transformers float32: 3/3 3/3" in text


def test_agreement_counts_the_common_prefix() -> None:
    assert leading_equal([1, 2, 3], [1, 2, 4]) == 2
    assert leading_equal([1, 2], [1, 2]) == 2
    assert leading_equal([], []) == 0
    assert agreement([[1, 2], [3]], [[1, 9], [3]]) == {
        "equal_leading_tokens": [1, 1],
        "tokens": [2, 1],
    }


def test_prompts_differ_by_key_alone() -> None:
    a, b = draw_prompts("1/2/x", 2, 50, 4096), draw_prompts("1/2/x", 2, 50, 4096)
    assert a == b
    assert a != draw_prompts("1/3/x", 2, 50, 4096)
    assert a[0] != a[1]
    assert all(16 <= token < 4096 for prompt in a for token in prompt)


class Scripted:
    dtype = "float32"
    gpus = ()

    def prefill(self, prompt: Any) -> Timing:
        return Timing(len(prompt), 2.0)

    def decode(self, prompts: Any, count: int, on_start: Any) -> Timing:
        on_start()
        return Timing(len(prompts) * count, 1.0)

    def greedy(self, prompt: Any, count: int) -> list[int]:
        return [7] * count

    def score(self, windows: Any) -> list[list[tuple[float, list[tuple[int, float]]]]]:
        return [[(-1.0, [(7, -0.5)])] for _ in windows]

    def traffic(self, arrivals: Any) -> list[Served]:
        return [Served(0.1, None, 0.2, len(one.prompt), 1, 0) for one in arrivals]

    def receipt(self) -> dict[str, Any]:
        return {}

    def counted(self) -> dict[str, int]:
        return {"prompt_tokens": 6, "cached_tokens": 0}


def test_the_worker_answers_each_kind_of_work() -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    started: list[str] = []

    def done(command: dict[str, Any]) -> dict[str, Any]:
        return answer(Scripted(), command, lambda: started.append(command["do"]))

    assert done({"do": "prefill", "prompts": prompts}) == {"tokens": 3, "seconds": 2.0}
    assert done({"do": "decode", "prompts": prompts, "count": 4})["tokens"] == 8
    assert done({"do": "greedy", "prompts": prompts, "count": 2}) == {"ids": [7, 7]}
    assert done({"do": "score", "prompts": prompts})["scores"][1][0][0] == -1.0
    arrivals = [{"at_s": 0.0, "prompt": [1, 2], "count": 1, "continues": False}]
    (served,) = done({"do": "traffic", "arrivals": arrivals})["served"]
    assert served["prompt_tokens"] == 2
    assert done({"do": "counted"})["cached_tokens"] == 0
    assert done({"do": "memory"})["peak_bytes"] == pytest.approx(peak_memory_bytes(), rel=0.1)
    with pytest.raises(KeyError):
        done({"do": "sleep"})
    assert started == ["decode"]


def test_all_cards_of_a_side_are_told_together() -> None:
    """Two cards, of which one is slower; the third tells no energy. What was spent before the work
    began to be timed is not counted."""
    facts = [{"clock_1": 1980}, {"clock_1": 1500}, {}]
    library = FakeLibrary([FakeCard(**of) for of in facts])
    spent = iter((1, 2, 1000, 2000, 4000, 7000, 1, 2, 3))  # mJ, card after card

    def energy(handle: Any, value: Any) -> int:
        value._obj.value = next(spent)
        return 3 if handle.value == 3 else 0

    library.nvmlDeviceGetTotalEnergyConsumption = energy  # type: ignore[attr-defined]
    cards = Nvml(library).cards()
    assert not isinstance(cards, Unknown)
    command = {"do": "decode", "prompts": [[1]], "count": 3}
    done = Cards(cards[:2]).measured(answer, Scripted(), command)
    assert done == {"tokens": 3, "seconds": 1.0, "joules": 8.0, "clocks": {"sm_mhz": 1500}}
    plain = {"tokens": 3, "seconds": 1.0}
    assert Cards(cards[2:]).measured(answer, Scripted(), command) == {**plain, "clocks": {}}
    assert Cards.of(()).measured(answer, Scripted(), command) == plain


def test_batches() -> None:
    assert parse_batches("1,8") == (1, 8)
    with pytest.raises(UserError):
        parse_batches("0")
    with pytest.raises(UserError):
        ModelLoad(rounds=0)
