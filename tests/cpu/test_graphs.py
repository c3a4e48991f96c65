"""Decode steps captured once and replayed with other numbers: the tokens and logits of steps that
are computed anew."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from metainfer.arch.cache_kinds import blocks_for
from metainfer.arch.tiny import tiny_config
from metainfer.kernels.registry import Registry
from metainfer.llm.graphs import Shape
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.runner import FixedShapes, Runner
from metainfer.llm.step import IN_FLIGHT, SequenceOutput, SequenceStep, Step, StepKind
from metainfer.nn.cache import CacheStorage
from metainfer.ops.cache_formats import FP32_CACHES
from tests.fakes.random_models import HARD, RandomModel, random_model
from tests.fakes.samplers import cpu_sampler
from tests.fakes.steps import CPU, load_model
from tests.fakes.tape import TapeGraphs
from tests.fakes.trimmed import trimming_registry

SLOTS, BLOCKS = 4, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return random_model(tmp_path_factory.mktemp("graphs") / "model", tiny_config(**HARD), seed=1)


@dataclass
class Known:
    """A sequence of a Bench."""

    request: Request
    slot: int
    blocks: tuple[int, ...]
    tokens: list[int]
    computed: int = 0


class Bench:
    """A runner and its sequences, each in scattered blocks.

    Args:
        unread: steps name the tokens that were sampled as such that only the device knows.
    """

    def __init__(
        self,
        weights: RandomModel,
        registry: Registry,
        fixed: FixedShapes | None,
        *,
        capture: bool = True,
        unread: bool = False,
    ) -> None:
        self.unread = unread
        arch = weights.arch
        model = load_model(weights.directory, arch, kernel_order="", registry=registry)
        cache = CacheStorage(
            arch,
            num_slots=SLOTS,
            num_blocks=BLOCKS,
            formats=FP32_CACHES,
            draft_rows=0,
            device=CPU,
            spare=fixed is not None,
        )
        self.runner = Runner(
            model,
            cache,
            sampler=cpu_sampler(arch.vocab_size, SLOTS),
            vocab_size=arch.vocab_size,
            eos_token_ids=arch.eos_token_ids,
            num_slots=SLOTS,
            max_blocks=4,
            device=CPU,
            fixed=fixed,
        )
        if capture:
            self.runner.capture()
        self.known: dict[str, Known] = {}

    def add(self, name: str, prompt: list[int], slot: int, blocks: tuple[int, ...]) -> None:
        request = Request(name, tuple(prompt), GREEDY, 0.0)
        self.known[name] = Known(request, slot, blocks, list(prompt))

    def lose(self, name: str, slot: int, blocks: tuple[int, ...]) -> None:
        """The sequence was preempted and comes back elsewhere."""
        known = self.known[name]
        known.slot, known.blocks, known.computed = slot, blocks, 0

    def step(self, *names: str) -> list[SequenceOutput]:
        """All pending tokens of each; those with one are decoded."""
        order = sorted(names, key=lambda name: self._pending(name) > 1)
        parts = tuple(self._part(self.known[name]) for name in order)
        short = sum(len(part.token_ids) == 1 for part in parts)
        new = [self.known[p.request_id].request for p in parts if p.start == 0]
        step = Step(0, StepKind.MIXED, parts, short, admitted=tuple(new))
        outputs = self.runner.execute(step).sequences
        for output in outputs:
            known = self.known[output.request_id]
            known.computed = len(known.tokens)
            known.tokens += output.token_ids
        return sorted(outputs, key=lambda output: output.request_id)

    def _pending(self, name: str) -> int:
        return len(self.known[name].tokens) - self.known[name].computed

    def _part(self, known: Known) -> SequenceStep:
        is_unread = self.unread and known.computed == len(known.tokens) - 1 > 0
        return SequenceStep(
            request_id=known.request.request_id,
            state_slot=known.slot,
            blocks=known.blocks[: blocks_for(len(known.tokens))],
            start=known.computed,
            token_ids=(IN_FLIGHT,) if is_unread else tuple(known.tokens[known.computed :]),
            sample_rows=1,
            resets_state=known.computed == 0,
        )


def story(bench: Bench, weights: RandomModel) -> list[list[SequenceOutput]]:
    """Sequences that come, decode in batches of changing size and over a border of blocks, are
    preempted, and go."""
    bench.add("a", weights.tokens(5, 1), 2, (7, 3, 1))
    bench.add("b", weights.tokens(120, 2), 0, (2, 9, 4))
    bench.add("c", weights.tokens(250, 3), 3, (11, 15, 0))
    outputs = [bench.step("a"), bench.step("b", "c")]
    outputs += [bench.step("a", "b", "c") for _ in range(11)]
    outputs += [bench.step("b") for _ in range(3)]
    bench.add("d", weights.tokens(3, 4), 1, (12, 13))
    outputs += [bench.step("d", "a")]  # a prompt beside a decode
    bench.lose("b", 2, (7, 14))
    outputs += [bench.step("b"), *(bench.step("b", "c", "d") for _ in range(6))]
    return outputs


@pytest.fixture(scope="module")
def expected(random_weights: RandomModel) -> list[list[SequenceOutput]]:
    return story(Bench(random_weights, trimming_registry(), None), random_weights)


def tokens_of(outputs: list[list[SequenceOutput]]) -> list[list[tuple[int, ...]]]:
    return [[output.token_ids for output in step] for step in outputs]


def test_replayed_with_other_numbers(random_weights: RandomModel, expected) -> None:
    """Captured over padding alone, before there was any sequence; replayed for all."""
    graphs = TapeGraphs()
    fixed = FixedShapes((1, 2, 3), (2, 4), graphs)
    bench = Bench(random_weights, trimming_registry(graphs.opaque), fixed)
    assert bench.runner.decode_steps is not None
    assert bench.runner.decode_steps.num_captured == 6
    assert min(graphs.lengths) > 100
    assert story(bench, random_weights) == expected
    assert graphs.replays == 11 + 3 + 6
    assert bench.runner.decode_steps.num_missed == 0


def test_tokens_that_only_the_device_knows(random_weights: RandomModel, expected) -> None:
    """Replayed, and beside a prompt."""
    graphs = TapeGraphs()
    fixed = FixedShapes((1, 2, 3), (2, 4), graphs)
    registry = trimming_registry(graphs.opaque)
    assert story(Bench(random_weights, registry, fixed, unread=True), random_weights) == expected
    assert graphs.replays == 11 + 3 + 6
    plain = Bench(random_weights, trimming_registry(), None, unread=True)
    assert story(plain, random_weights) == expected


def test_without_graphs_the_shapes_are_the_same(random_weights: RandomModel, expected) -> None:
    bench = Bench(random_weights, trimming_registry(), FixedShapes((1, 2, 3), (2, 4)))
    assert story(bench, random_weights) == expected


def test_padding_changes_no_token(random_weights: RandomModel, expected) -> None:
    """Rows beside padding are summed in another order by products of the CPU."""
    graphs = TapeGraphs()
    bench = Bench(random_weights, trimming_registry(graphs.opaque), FixedShapes((4,), (4,), graphs))
    assert tokens_of(story(bench, random_weights)) == tokens_of(expected)
    assert graphs.replays == 20


def test_the_smallest_shape_that_holds_a_step(random_weights: RandomModel) -> None:
    bench = Bench(random_weights, trimming_registry(), FixedShapes((1, 4), (1, 3)))
    steps = bench.runner.decode_steps
    assert steps is not None
    assert list(steps.shapes()) == [(4, 3), (4, 1), (1, 3), (1, 1)]

    def blocks(tokens: int) -> tuple[int, ...]:
        return tuple(range(blocks_for(tokens)))

    def shape(*starts: int, rows: int = 1, prompt_logprobs: bool = False, decoding: int = 9):
        parts = tuple(
            SequenceStep(str(n), n, blocks(start + rows), start, (1,) * rows, 1, prompt_logprobs)
            for n, start in enumerate(starts)
        )
        return steps.shape_of(Step(0, StepKind.DECODE, parts, min(decoding, len(parts))))

    assert shape(127) == Shape(1, 1)
    assert shape(128) == Shape(1, 3)
    assert shape(3, 383) == Shape(4, 3)
    assert shape(3, 384) is None, "longer than all"
    assert shape(1, 2, 3, 4, 5) is None, "more rows than all"
    assert shape(1, 2, rows=2) == Shape(4, 1)
    assert shape(1, prompt_logprobs=True) is None
    assert shape(1, 200, decoding=1) is None


def test_what_has_no_graph_is_counted(random_weights: RandomModel, expected, caplog) -> None:
    fixed = FixedShapes((3,), (4,), TapeGraphs())
    bench = Bench(random_weights, trimming_registry(), fixed, capture=False)
    steps = bench.runner.decode_steps
    assert steps is not None
    assert tokens_of(story(bench, random_weights)) == tokens_of(expected)
    assert steps.num_missed == 20
    assert sum("has no graph" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("sizes", [((1, 2), (4,)), ((3,), (1,))])
def test_steps_larger_than_all_graphs_are_counted(
    random_weights: RandomModel, expected, caplog, sizes
) -> None:
    graphs = TapeGraphs()
    registry = trimming_registry(graphs.opaque)
    bench = Bench(random_weights, registry, FixedShapes(*sizes, graphs))
    steps = bench.runner.decode_steps
    assert steps is not None
    assert tokens_of(story(bench, random_weights)) == tokens_of(expected)
    assert 0 < steps.num_missed == 20 - graphs.replays
    assert sum("has no graph" in record.message for record in caplog.records) == 1
