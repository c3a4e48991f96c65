"""Whatever steps come, they compile nothing that warm-up has not met: no GPU is needed to know."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import metainfer.shipped
from metainfer.arch.cache_kinds import blocks_for
from metainfer.arch.families import read_arch
from metainfer.hardware.machine import Gpu
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.torch_products.shapes import LibraryShapes
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.kernels.tuned import Measured, Timing, Tuned, key_of
from metainfer.llm.made_steps import Room, prefill, step
from metainfer.llm.paper import Paper, Units, covering_steps
from metainfer.llm.step import SequenceStep, Step
from metainfer.ops.targets import CARD_KINDS
from metainfer.ops.uses import uses_of
from metainfer.plan.build import build_plan
from metainfer.plan.settings import EngineSettings
from tests.fakes.machines import GIB, make_machine

STEPS = 60
FOUR_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 0,
    "vocab_size": 32768,
}
PEBBLE = str(Path(metainfer.shipped.__file__).parent / "pebble")
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V4-Flash": ("deepseek-v4-flash", FOUR_LAYERS, {"max_model_len": 40_000}),
    "V4-Flash, caches of bytes": (
        "deepseek-v4-flash",
        FOUR_LAYERS,
        {"max_model_len": 12_000, "kv_cache_dtype": "fp8", "index_cache_dtype": "fp8"},
    ),
    "V4-Flash over four ranks": (
        "deepseek-v4-flash",
        FOUR_LAYERS,
        {"max_model_len": 12_000, "tensor_parallel_size": 4},
    ),
    "V4-Flash as released": ("deepseek-v4-flash", {}, {"max_model_len": 20_000}),
    "pebble": (PEBBLE, {}, {}),
}


@cache
def prepared(model: str, card: str) -> tuple[Paper, Room, Units]:
    """The model on paper, what its steps may be, and all that warm-up compiles."""
    directory, overrides, flags = MODELS[model]
    kind = CARD_KINDS[card]
    arch = read_arch(directory, overrides)
    settings = EngineSettings(
        device="cuda", hf_overrides=overrides, max_num_seqs=9, max_num_batched_tokens=8192, **flags
    )
    launch = RecordingLauncher(kind.capability, kind.multiprocessors)
    able = builtin_registry(launch).capabilities(kind.target)
    gpu = Gpu(kind.card, kind.capability, 400 * GIB, 400 * GIB)
    gpus = (gpu,) * flags.get("tensor_parallel_size", 1)
    plan = build_plan(make_machine(gpus=gpus), arch, settings, able)
    paper = Paper(arch, plan, kind.target, kind.multiprocessors)
    room = Room.of(plan)
    _, known = covering_steps(room, paper.of_step)
    return paper, room, known | paper.of_shapes() | paper.of_draws()


def drawn_length(draw: random.Random, most: int) -> int:
    """Small and large ones, and multiples of what kernels may like."""
    kinds = (
        draw.randint(1, min(300, most)),
        draw.randint(1, most),
        int(2 ** draw.uniform(0, most.bit_length() - 1)),
        16 * draw.randint(1, max(1, most // 16)),
        128 * draw.randint(1, max(1, most // 128)),
    )
    return min(draw.choice(kinds), most)


def drawn_step(draw: random.Random, room: Room) -> Step:
    """Sequences that decode, and chunks of prompts of any length at any place beside them."""
    decoding = draw.choice((0, 0, 1, 2, room.sequences - 1))
    left = room.rows - decoding
    parts = []
    for slot in range(decoding):
        parts.append(drawn_part(draw, slot, drawn_length(draw, room.tokens), 1))
    prompts = draw.choice((1, 1, 1, 2, 3)) if decoding < room.sequences else 0
    for slot in range(decoding, min(decoding + prompts, room.sequences)):
        end = drawn_length(draw, room.tokens)
        rows = min(drawn_length(draw, room.rows), end, left)
        if rows > 0:
            left -= rows
            parts.append(drawn_part(draw, slot, end, rows))
    return step(parts, decoding)


def drawn_part(draw: random.Random, slot: int, end: int, rows: int) -> SequenceStep:
    return SequenceStep(
        request_id=f"request {slot}",
        state_slot=slot,
        blocks=tuple(draw.sample(range(10_000), blocks_for(end))),
        start=end - rows,
        token_ids=(0,) * rows,
        sample_rows=1 if rows == 1 else draw.choice((0, 1)),
        prompt_logprobs=rows > 1 and draw.random() < 0.1,
    )


@pytest.mark.parametrize(
    ("model", "card"),
    [
        ("V4-Flash", "sm_90"),
        pytest.param("V4-Flash, caches of bytes", "sm_120", marks=pytest.mark.soak),
        pytest.param("V4-Flash over four ranks", "sm_120", marks=pytest.mark.soak),
        ("V4-Flash as released", "sm_89"),
        ("pebble", "sm_90"),
    ],
)
def test_no_step_compiles_what_warm_up_has_not(model: str, card: str) -> None:
    paper, room, known = prepared(model, card)
    draw = random.Random(f"{model} {card}")
    for _ in range(STEPS):
        made = drawn_step(draw, room)
        unknown = paper.of_step(made) - known
        assert not unknown, (unknown, [(p.start, len(p.token_ids)) for p in made.sequences])


def test_products_that_torch_does_not_know_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    paper, room, _ = prepared("V4-Flash", "sm_90")
    monkeypatch.setattr(paper, "_products", nullcontext())
    steps = [step([prefill(room.tokens, rows)]) for rows in (3, 70, 700)]
    known = [paper.of_step(one) for one in steps]
    monkeypatch.setattr(paper, "_products", LibraryShapes())
    assert [paper.of_step(one) for one in steps] == known
    assert all(known)


def test_a_length_that_a_kernel_asks_for_would_be_found() -> None:
    """The steps that warm-up would not run without a class of its own are missed at once."""
    paper, room, _ = prepared("pebble", "sm_90")
    steps, known = covering_steps(replace(room, rows=32), paper.of_step)
    assert all(one.num_rows <= 32 for one in steps)
    draw = random.Random(1)
    assert any(paper.of_step(drawn_step(draw, room)) - known for _ in range(20))


def test_what_was_measured_for_few_rows_alone_is_met() -> None:
    """Between 16 and 32 rows a backend that is the best up to 20 lies on no power of two, and not
    halfway."""
    _, room, _ = prepared("pebble", "sm_90")

    def units_of(one: Step) -> Units:
        return frozenset(["few" if 16 < one.num_rows <= 20 else "usual"])

    assert covering_steps(room, units_of)[1] == {"usual"}
    assert covering_steps(room, units_of, (20,))[1] == {"few", "usual"}
    steps, _ = covering_steps(room, lambda one: frozenset([one.num_rows]), (20,))
    assert {20, 21} <= {one.num_rows for one in steps}


def test_borders_are_where_another_backend_begins() -> None:
    directory, overrides, flags = MODELS["V4-Flash"]
    kind = CARD_KINDS["sm_90"]
    arch = read_arch(directory, overrides)
    settings = EngineSettings(device="cuda", hf_overrides=overrides, **flags)
    launch = RecordingLauncher(kind.capability, kind.multiprocessors)
    registry = builtin_registry(launch)
    gpu = Gpu(kind.card, kind.capability, 400 * GIB, 400 * GIB)
    plan = build_plan(make_machine(gpus=(gpu,)), arch, settings, registry.capabilities(kind.target))
    case = next(
        use.case
        for use in uses_of("deepseek-v4-flash", 1, activations="fp8")
        if use.op == "linear.grouped_fp8_rows" and use.served
    )
    slow, fast = {"cuda": 1.0, "triton": 2.0}, {"cuda": 2.0, "triton": 1.0}
    timings = (Timing(12, slow), Timing(20, fast), Timing(600, slow))
    measured = {key_of("linear.grouped_fp8_rows", case): Measured(timings)}
    tuned = Tuned(kind.target, measured)
    assert Paper(arch, plan, kind.target, kind.multiprocessors).borders == ()
    assert Paper(arch, plan, kind.target, kind.multiprocessors, tuned).borders == (12, 20)
