"""Decode steps as CUDA graphs: the bits of the same steps started kernel by kernel, no wait for the
device, and an engine that answers alike with graphs and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from metainfer.llm.engine import Engine
from metainfer.llm.graphs import CudaGraphs
from metainfer.llm.offline import generate
from metainfer.llm.request import SamplingParams
from metainfer.ops.base import Target
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir
from tests.fakes.decode_bench import DecodeBench, Loaded, load_pebble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

ROW_SIZES = (1, 2, 4, 8, 9)
# Before the first entry, around windows of 4 and of 128, in several blocks, beyond what the
# indexer lets through unscored.
PROMPTS = (1, 3, 126, 127, 255, 380, 600, 130, 510)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)


@pytest.fixture(
    scope="module",
    params=[("bfloat16", "bfloat16"), ("fp8", "fp8"), ("fp8", "fp4")],
    ids=lambda formats: "latents {}, index keys {}".format(*formats),
)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    latents, keys = request.param
    target = Target("cuda", torch.cuda.get_device_capability())
    return load_pebble(target, kv_cache_dtype=latents, index_cache_dtype=keys)


@pytest.fixture(scope="module")
def pair(loaded: Loaded) -> tuple[DecodeBench, DecodeBench]:
    """The same shapes with graphs and without."""
    with_graphs = DecodeBench(loaded, ROW_SIZES, graphs=CudaGraphs())
    return with_graphs, DecodeBench(loaded, ROW_SIZES)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 4000, (length,), generator=generator).tolist()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("count", range(1, 10))
def test_bits_of_steps_without_graphs(pair: tuple[DecodeBench, DecodeBench], count: int) -> None:
    graphs, eager = pair
    assert graphs.steps is not None and graphs.steps.num_captured == len(ROW_SIZES) * 3
    chosen = [(n, prompt(length, n)) for n, length in enumerate(PROMPTS[:count])]
    ours, theirs = ([bench.start(*each) for each in chosen] for bench in pair)
    for step in range(6):
        assert torch.equal(graphs.step(*ours), eager.step(*theirs)), step
    ours[0], theirs[0] = (
        bench.preempt(tracks[0], 9) for bench, tracks in zip(pair, (ours, theirs), strict=True)
    )
    for step in range(3):
        assert torch.equal(graphs.step(*ours), eager.step(*theirs)), step
    assert [track.tokens for track in ours] == [track.tokens for track in theirs]
    assert graphs.steps.num_missed == 0


def test_logits_of_steps_in_shapes_of_their_own(
    loaded: Loaded, pair: tuple[DecodeBench, DecodeBench]
) -> None:
    """Shapes change the order of sums and nothing else. Two sets of right kernels on a CPU, with
    rows rounded to fp8 and experts chosen by scores, agree to 0.998 here."""
    graphs, cut = pair[0], DecodeBench(loaded, None)
    chosen = [(n, prompt(length, n)) for n, length in enumerate(PROMPTS)]
    ours, theirs = ([bench.start(*each) for each in chosen] for bench in (graphs, cut))
    for _ in range(5):
        got, expected = graphs.step(*ours), cut.step(*theirs)
        assert torch.nn.functional.cosine_similarity(got, expected).min() > 0.995
        for mine, other in zip(ours, theirs, strict=True):
            other.tokens[-1] = mine.tokens[-1]


@pytest.mark.parametrize("place", [0, 1], ids=["graphs", "eager"])
def test_a_decode_step_waits_for_nothing(pair: tuple[DecodeBench, DecodeBench], place: int) -> None:
    bench = pair[place]
    tracks = [bench.start(n, prompt(length, n)) for n, length in enumerate((5, 127, 300))]
    bench.step(*tracks)
    assert bench.steps is not None
    for _ in range(2):
        step = bench.described(*tracks)
        shape = bench.steps.shape_of(step)
        assert shape is not None
        with torch.inference_mode(), no_waiting():
            bench.steps.run(shape, bench.batch.decode_rows(step, shape.rows))


def test_decodes_beside_a_prefill_wait_for_nothing(loaded: Loaded) -> None:
    bench = DecodeBench(loaded, None)
    tracks = [bench.start(n, prompt(length, n)) for n, length in enumerate((5, 127, 300))]
    tracks.append(bench.start(7, prompt(40, 7)))
    tracks[-1].tokens += prompt(200, 8)
    bench.step(*tracks)  # whatever is done once is done
    tracks[-1].tokens += prompt(199, 9)
    with torch.inference_mode(), no_waiting():
        inputs = bench.batch.build(bench.described(*tracks))
        loaded.model.logits(loaded.model.forward(inputs, bench.cache))


def answers(**flags) -> list[tuple]:
    """Tokens and log-probabilities of some prompts, one at a time, so that steps are the same."""
    settings = EngineSettings(device="cuda", max_model_len=1024, max_num_seqs=4, **flags)
    with Engine.load(pebble_dir(), settings) as engine:
        assert engine.plan.cuda_graphs.value == ("off" if flags else "on")
        results = [generate(engine, [prompt(n, n)], GREEDY)[0] for n in (5, 120, 127, 700)]
    assert all(result.error is None for result in results)
    return [(result.token_ids, result.logprobs) for result in results]


def test_an_engine_answers_alike_with_graphs_and_without() -> None:
    assert answers() == answers(enforce_eager=True)


def test_preempted_sequences_go_on() -> None:
    """Fewer blocks than all sequences need in the end."""
    settings = EngineSettings(device="cuda", max_num_seqs=4, num_blocks_override=8)
    prompts = [prompt(250, n) for n in range(4)]
    with Engine.load(pebble_dir(), settings) as engine:
        results = generate(engine, prompts, replace(GREEDY, max_tokens=200))
        assert engine.stats().num_preemptions > 0
    assert [len(result.token_ids) for result in results] == [200] * 4
