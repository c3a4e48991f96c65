"""Ranks that add up rows of prompts in 8 bits, and engines whose collectives take ways that were
measured: which way is taken changes no bit, and which form travels is no secret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from metainfer.arch.tiny import tiny_config
from metainfer.comm.group import Group, Solo
from metainfer.comm.virtual import run_ranks, virtual_groups
from metainfer.hardware.probe import probe
from metainfer.llm.engine import Engine
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import SamplingParams
from metainfer.nn.sums import sum_rows
from metainfer.plan import comm_record
from metainfer.plan.comm_record import Way, keep
from metainfer.plan.plan import Origin
from metainfer.plan.routes import DECODE, PREFILL, Rival
from tests.fakes.engines import load_engine
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model

FIRST = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
LENGTHS = (37, 1, 130)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    config = tiny_config(o_groups=4, hidden_size=128, **HARD)
    return random_model(tmp_path_factory.mktemp("wire") / "model", config, seed=3)


@dataclass(frozen=True)
class Told(Solo):
    """A group that notes its sums, each of which it gives back."""

    rank: int = 0
    size: int = 1
    wire: str = "fp8"
    sums: list[tuple[int, str]] = field(default_factory=list)

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        self.sums.append((len(partial), phase))
        return partial


@dataclass
class Rows:
    num_rows: int


@dataclass
class Step:
    decode: Rows | None
    prefills: Sequence[int]


@pytest.mark.parametrize(
    ("wire", "step", "rows", "sums"),
    [
        ("fp8", Step(Rows(3), ()), 3, [(3, DECODE)]),
        ("fp8", Step(None, (1,)), 9, [(9, PREFILL)]),
        ("fp8", Step(Rows(3), (1, 1)), 9, [(3, DECODE), (6, PREFILL)]),
        ("fp8", Step(Rows(3), (1,)), 3, [(3, DECODE)]),  # no row of the prompt goes on
        ("plain", Step(Rows(3), (1,)), 9, [(9, PREFILL)]),
    ],
)
def test_rows_that_decode_never_travel_in_8_bits(
    wire: str, step: Step, rows: int, sums: list[tuple[int, str]]
) -> None:
    group = Told(wire=wire)
    partial = torch.arange(rows * 4.0).view(rows, 4)
    assert torch.equal(sum_rows(group, partial, step), partial)  # type: ignore[arg-type]
    assert group.sums == sums


@pytest.mark.parametrize("context", [1, 2])
def test_logits_with_sums_in_8_bits_are_near_and_the_same_on_all_ranks(
    model: RandomModel, context: int
) -> None:
    """By heads, and with tokens shared, where partial sums of experts are scattered."""

    def body(group: Group) -> list[torch.Tensor]:
        loaded = load_model(
            model.directory, model.arch, kernel_order="", group=group, context=context
        )
        driver = Driver(loaded, model.arch)
        return [driver.run(model.tokens(length, seed=length), 300, 61) for length in (361,)]

    exact = run_ranks(virtual_groups(2), body)[0]
    for wire in ("fp8", "int8"):
        first, second = run_ranks(virtual_groups(2, wire=wire), body)
        for ours, theirs, plain in zip(first, second, exact, strict=True):
            assert torch.equal(ours, theirs)
            error = (ours - plain).norm() / plain.norm()
            assert 1e-4 < error < 0.2  # a code of fp8 has 3 bits behind the first


# ---- engines of two processes ----


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Somebody measured that what nobody takes by bytes is the fastest."""
    monkeypatch.setattr(comm_record, "default_cache", lambda: tmp_path)
    once, sizes = (1e-6, 1e-6), (1024, 2**20)
    ways = [
        Way("all_reduce", "plain", Rival("ring", sizes, (1e-6, 2e-6))),
        Way("all_reduce", "plain", Rival("gloo, summed here", sizes, (2e-6, 1e-6))),
        Way("all_reduce", "fp8", Rival("gloo, summed here", sizes, once)),
        Way("all_gather", "plain", Rival("gloo", sizes, once)),
    ]
    keep(probe(), 2, 1, "2026-01-31", ways)
    yield


def ask(engine: Engine, model: RandomModel) -> list[Result]:
    """One by one, so that prompts are cut alike whoever is faster."""
    prompts = [model.tokens(length, seed=length) for length in LENGTHS]
    return [generate(engine, [prompt], FIRST)[0] for prompt in prompts]


def numbers(results: list[Result]) -> list[list[float]]:
    return [[one.logprob for one in result.prompt_logprobs if one] for result in results]


def test_measured_ways_change_no_bit(
    model: RandomModel,
    kept: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Prompts in chunks, whose rows travel in 8 bits, and decoding, whose rows do not."""
    flags = {
        "tensor_parallel_size": 2, "threads": 2, "max_num_batched_tokens": 100, "wire_dtype": "fp8",
    }  # fmt: skip
    with caplog.at_level("INFO", logger="metainfer"), load_engine(model, **flags) as engine:
        ways, wire = engine.plan.collective_ways, engine.plan.wire_dtype
        assert ways.origin is Origin.MEASURED
        assert ways.value.startswith(
            "all_reduce in decode: ring to 1024, then gloo, summed here; all_reduce in prefill:"
            " gloo, summed here; all_gather: gloo;"
        )
        assert (wire.value, wire.origin) == ("fp8", Origin.FLAG)
        measured = ask(engine, model)
    said = [text for text in caplog.messages if text.startswith("ways of collectives: ")]
    assert len(said) == 1 and "bench comm on 2026-01-31" in said[0]
    monkeypatch.setattr(comm_record, "default_cache", lambda: tmp_path / "nothing")
    with load_engine(model, **flags) as engine:
        assert engine.plan.collective_ways.origin is Origin.DEFAULT
        by_bytes = ask(engine, model)
    assert all(result.error is None for result in (*measured, *by_bytes))
    assert numbers(measured) == numbers(by_bytes)
    assert [one.token_ids for one in measured] == [one.token_ids for one in by_bytes]
    exact = Driver(load_model(model.directory, model.arch, kernel_order=""), model.arch)
    for length, coded in zip(LENGTHS, numbers(measured), strict=True):
        tokens = model.tokens(length, seed=length)
        own = exact.run(tokens).log_softmax(-1)[range(length - 1), tokens[1:]]
        assert length == 1 or 1e-3 < (own - torch.tensor(coded)).abs().mean() < 0.2
