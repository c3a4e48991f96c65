"""The shared expert's stream: which steps have it, what waits for what, and that it changes
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from metainfer.arch.tiny import tiny_config
from metainfer.nn.builder import SideStream
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model


class Stream:
    """Notes who waits for whom, and how often work was put on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        noted.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main", noted))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return noted


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return random_model(tmp_path_factory.mktemp("shared") / "model", tiny_config(**HARD), seed=1)


@pytest.mark.parametrize(("most_rows", "on_prompt"), [(None, True), (4, False)])
def test_steps_of_few_rows_have_the_stream_and_others_where_it_is_for_all(
    weights: RandomModel, log: list[str], most_rows: int | None, on_prompt: bool
) -> None:
    tokens = weights.tokens(9)
    results = []
    for side in (None, SideStream(Stream("side", log), most_rows)):  # type: ignore[arg-type]
        made = Driver(load_model(weights.directory, weights.arch, side_stream=side), weights.arch)
        sequence = made.start()
        log.clear()
        made.step((sequence, tokens[:-1]))
        of_prompt = log.copy()
        log.clear()
        (logits_1V,) = made.step((sequence, tokens[-1:]), decoding=1)
        results.append((logits_1V, of_prompt, log.copy()))
    (plain, *nothing), (beside, of_prompt, of_decode) = results
    assert nothing == [[], []]
    assert torch.equal(beside, plain)
    each = ["side waits for main", "on side", "main waits for side"]
    assert of_decode == each * weights.arch.num_layers
    assert bool(of_prompt) == on_prompt
