"""Weights that are asked for before they are read: when, which, how much, and on which stream; and
that every byte which is to come is asked for once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from metainfer.arch.tiny import tiny_config
from metainfer.kernels.registry import Backend, Registry
from metainfer.kernels.triton import prefetch
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.prefetch import PIECE_BYTES, unit_places
from metainfer.nn import weights_ahead
from metainfer.nn.builder import Prefetch
from metainfer.nn.weights_ahead import MOST_ROWS
from metainfer.ops.prefetch import PrefetchCase
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.steps import Driver, load_model
from tests.fakes.trimmed import trimming_registry

MAIN, SIDE = "main", "side"


@dataclass
class Streams:
    """Two streams that only note what is asked of them.

    Attributes:
        log: ("wait", who, for whom), ("ask", where, bytes) and ("read", where, bytes).
    """

    log: list[tuple[str, str, Any]] = field(default_factory=list)
    current: str = MAIN

    def of(self, name: str) -> Any:
        return _Stream(self, name)

    @contextmanager
    def switched(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def wrap(self, backend: Backend) -> Backend:
        if backend.op == "weights.prefetch":
            return replace(backend, run=partial(self._asked, backend.run))
        if backend.op.startswith("linear."):
            return replace(backend, run=partial(self._read, backend.run))
        return backend

    def _asked(self, run: Any, case: Any, weight_N: torch.Tensor) -> Any:
        self.log.append(("ask", self.current, (weight_N.data_ptr(), min(case.size, case.taken))))
        return run(case, weight_N)

    def _read(self, run: Any, case: Any, prepared: Any, *arguments: Any) -> Any:
        (weight, *_) = prepared
        self.log.append(("read", self.current, (weight.data_ptr(), weight.nbytes)))
        return run(case, prepared, *arguments)


@dataclass
class _Stream:
    streams: Streams
    name: str

    def wait_stream(self, other: Any) -> None:
        self.streams.log.append(("wait", self.name, other.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.of(made.current))
    monkeypatch.setattr(torch.cuda, "stream", made.switched)
    monkeypatch.setattr(weights_ahead, "_ALIGNMENT", 1)  # files are not read to where GPUs want it
    return made


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return random_model(tmp_path_factory.mktemp("ahead") / "model", tiny_config(**HARD), seed=1)


def driver(weights: RandomModel, streams: Streams | None, most_bytes: int) -> Driver:
    asked = None if streams is None else Prefetch(streams.of(SIDE), most_bytes)
    wrap = (lambda backend: backend) if streams is None else streams.wrap
    registry: Registry = trimming_registry(wrap)
    model = load_model(weights.directory, weights.arch, registry=registry, prefetch=asked)
    return Driver(model, weights.arch)


def decoded(made: Driver, log: list[Any], tokens: list[int]) -> tuple[torch.Tensor, list[Any]]:
    """Logits of a decode step behind a prompt, and what it noted; the prompt notes no asking."""
    sequence = made.start()
    made.step((sequence, tokens[:-1]))
    assert not [one for one in log if one[0] == "ask"]
    log.clear()
    (logits_1V,) = made.step((sequence, tokens[-1:]), decoding=1)
    noted = list(log)
    log.clear()
    return logits_1V, noted


def test_what_is_asked_for_is_read_next_and_changes_nothing(
    weights: RandomModel, streams: Streams
) -> None:
    tokens = weights.tokens(40)
    plain, nothing = decoded(driver(weights, None, 0), [], tokens)
    assert nothing == []
    logits, log = decoded(driver(weights, streams, 2**40), streams.log, tokens)
    assert torch.equal(logits, plain)
    asked = [one[2] for one in log if one[0] == "ask"]
    layers = weights.arch.num_layers
    assert len({place for place, _ in asked}) == len(asked)
    read = {place for kind, _, (place, _) in _with_places(log) if kind == "read"}
    # The router's is no product of its own; all else is read by a product of this step.
    assert len([place for place, _ in asked if place not in read]) == layers
    order = [(kind, place) for kind, _, (place, _) in _with_places(log)]
    for place, _ in asked:
        if place in read:
            assert order.index(("ask", place)) < order.index(("read", place))
    # First the residual streams are mixed, then attention's outputs are awaited, then experts'.
    forks = [one for one in log if one == ("wait", SIDE, MAIN)]
    assert len(forks) == 3 * layers + 1
    assert {where for kind, where, _ in log if kind == "ask"} == {SIDE}
    assert {where for kind, where, _ in log if kind == "read"} == {MAIN}
    assert log[-1] == ("wait", MAIN, SIDE)


def _with_places(log: list[Any]) -> list[Any]:
    return [one for one in log if one[0] != "wait"]


def test_no_more_is_asked_for_at_once_than_the_limit(
    weights: RandomModel, streams: Streams
) -> None:
    most = 10_000
    _, log = decoded(driver(weights, streams, most), streams.log, weights.tokens(20))
    together, found = 0, []
    for kind, _, what in log:
        if kind == "wait":
            together = 0
        elif kind == "ask":
            together += what[1]
            found.append(together)
    assert max(found) == most


def test_steps_of_many_rows_and_of_prompts_ask_for_nothing(
    weights: RandomModel, streams: Streams
) -> None:
    made = driver(weights, streams, 2**40)
    sequence, other = made.start(), made.start()
    made.fixed_step((sequence, [1]), rows=MOST_ROWS + 1, blocks=1)
    made.step((sequence, [2]), (other, [3, 4, 5]), decoding=1)
    assert not [one for one in streams.log if one[0] == "ask"]
    made.fixed_step((sequence, [6]), rows=MOST_ROWS, blocks=1)
    assert [one for one in streams.log if one[0] == "ask"]


@triton.jit
def count_bytes(
    counts_ptr, units, step, size, UNITS: tl.constexpr, UNIT: tl.constexpr, THREADS: tl.constexpr
):
    for first in range(0, units, THREADS):
        n = first + tl.arange(0, THREADS)
        at, there = unit_places(n, step, size, UNITS, UNIT)
        byte = tl.arange(0, UNIT)[None, :]
        some = (n < units)[:, None] & (byte < there[:, None])
        place = counts_ptr + at[:, None] + byte
        tl.store(place, tl.load(place, some, 0) + 1, some)


class Counting:
    """A launcher that counts how often each byte is asked for."""

    interpreted = portable = False

    def __init__(self, capability: tuple[int, int], size: int) -> None:
        self.capability, self.multiprocessors = capability, 4
        self.counts = torch.zeros(size + PIECE_BYTES, dtype=torch.uint8)

    def __call__(self, kernel: Any, grid: Any, weight: Any, size: int, units: int, step: int,
                 **named: Any) -> None:  # fmt: skip
        self.grid = grid
        if 0 not in grid and not weight.is_meta:
            constants = {name: named[name] for name in ("UNITS", "UNIT", "THREADS")}
            JitLauncher(self.capability, 4)(
                count_bytes, (1,), self.counts, units, step, size, **constants
            )


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (16, 16),
        (5 * PIECE_BYTES, 5 * PIECE_BYTES),
        (5 * PIECE_BYTES + 48, 9 * PIECE_BYTES),
        (37 * PIECE_BYTES, 20 * PIECE_BYTES),
        (37 * PIECE_BYTES - 32, 36 * PIECE_BYTES + 5),
        (9 * PIECE_BYTES, PIECE_BYTES - 1),
    ],
)
def test_each_byte_is_asked_for_once_and_evenly(
    capability: tuple[int, int], size: int, taken: int
) -> None:
    launch = Counting(capability, size)
    prefetch.prefetch(launch, PrefetchCase(size, taken), torch.zeros(size, dtype=torch.uint8))
    assert not launch.counts[size:].any()
    counts = launch.counts[:size]
    assert int(counts.max()) <= 1
    wanted = size if taken >= size else taken // PIECE_BYTES * PIECE_BYTES
    assert wanted - PIECE_BYTES < int(counts.sum()) <= wanted
    pieces = counts.split(PIECE_BYTES)
    half = sum(int(piece.sum()) for piece in pieces[: len(pieces) // 2])
    assert abs(2 * half - int(counts.sum())) <= 2 * PIECE_BYTES


def test_programs_are_few() -> None:
    """They take no multiprocessor from others for long."""
    for size, programs in ((64, 1), (2**20, 8), (2**25, 66), (2**28, 66)):
        launch = Counting((9, 0), 0)
        launch.multiprocessors = 132
        weight = torch.empty(size, dtype=torch.uint8, device="meta")
        prefetch.prefetch(launch, PrefetchCase(size, 2**24), weight)
        assert launch.grid == (programs,)
