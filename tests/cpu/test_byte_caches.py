"""Caches of bytes: however the rows of a sequence are divided into steps, and whoever else is in
them, its logits stay the same, in layers of every kind.

What is left between two ways of chunking are numbers on the border of two codes: products over
other numbers of rows are summed up in another order. A code that flips moves few logits by little;
`near` holds the difference against what coding itself does.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.tiny import tiny_arch, tiny_config
from metainfer.core.errors import MetainferError, UserError
from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import SamplingParams
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.cache import CacheStorage
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats, cache_formats
from metainfer.plan.ledger import block_bytes, state_bytes
from metainfer.plan.settings import EngineSettings
from tests.fakes.random_models import HARD, RandomModel, layers, random_model
from tests.fakes.steps import Driver, load_model

LENGTH = 300
DRAFTS = 3
WIDTHS = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "num_attention_heads": 2,
}
KINDS = {"sliding": (0, 0), "chosen entries": (4, 4), "all entries": (128, 128)}


@dataclass(frozen=True)
class Coded:
    """A model over caches of bytes, and the same over plain ones.

    Attributes:
        rounding: mean difference between the two, over all logits.
    """

    weights: RandomModel
    model: DeepseekV4
    caches: CacheFormats
    tokens: list[int]
    whole: torch.Tensor
    rounding: float

    def driver(self) -> Driver:
        return Driver(
            self.model, self.weights.arch, caches=self.caches, draft_rows=DRAFTS, num_slots=5
        )

    def near(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        off = (logits - expected).abs()
        return bool(off.mean() < self.rounding / 20)


@pytest.fixture(
    scope="module",
    params=[
        *((kind, "index_fp8", "") for kind in KINDS),
        ("chosen entries", "index_fp4", ""),
        ("chosen entries", "index_fp4", "*=reference"),
    ],
    ids=" ".join,
)
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Coded:
    kind, keys, order = request.param
    config = tiny_config(**layers(*KINDS[kind]), **WIDTHS, **HARD)
    weights = random_model(tmp_path_factory.mktemp("coded") / "model", config, seed=1)
    caches = CacheFormats("v4_fp8", keys)
    models = {
        formats: load_model(
            weights.directory,
            weights.arch,
            kernel_order=order,
            draft_rows=DRAFTS,
            caches=formats,
        )
        for formats in (FP32_CACHES, caches)
    }
    tokens = weights.tokens(LENGTH)
    plain, whole = (
        Driver(model, weights.arch, caches=formats, draft_rows=DRAFTS).run(tokens)
        for formats, model in models.items()
    )
    rounding = float((plain - whole).abs().mean())
    return Coded(weights, models[caches], caches, tokens, whole, rounding)


def test_coding_changes_little(coded: Coded) -> None:
    assert 1e-4 < coded.rounding < 0.2 * float(coded.whole.std())


@pytest.mark.parametrize(
    "lengths", [(10, 117, 30), (128, 128), (1, 2, 3, 5, 127, 1, 1, 130), (15, 1, 16, 17)], ids=str
)
def test_chunks_change_nothing(coded: Coded, lengths: tuple[int, ...]) -> None:
    assert coded.near(coded.driver().run(coded.tokens, *lengths), coded.whole)


def test_decoding_gives_what_one_step_gives(coded: Coded) -> None:
    driver = coded.driver()
    sequence = driver.start()
    first = driver.step((sequence, coded.tokens[:120]))[0]
    rest = driver.decode(coded.tokens[120:160], sequence)
    assert coded.near(torch.cat([first, rest]), coded.whole[:160])


def test_company_changes_no_bit(coded: Coded) -> None:
    """Decoding beside others in steps of fixed shapes, most of whose rows are padding."""
    alone, beside = coded.driver(), coded.driver()
    one, same, other = alone.start(), beside.start(), beside.start()
    alone.step((one, coded.tokens[:100]))
    beside.step((same, coded.tokens[:100]))
    beside.step((other, coded.tokens[150:290]))
    for place in range(100, 116):
        token = [coded.tokens[place]]
        expected = alone.fixed_step((one, token), rows=8, blocks=3)[0]
        got, _ = beside.fixed_step((same, token), (other, [place]), rows=8, blocks=3)
        assert torch.equal(got, expected)


def test_chunks_beside_rows_that_decode(coded: Coded) -> None:
    driver = coded.driver()
    old, new = driver.start(), driver.start()
    driver.step((old, coded.tokens[:200]))
    logits = []
    for place, (start, stop) in enumerate([(0, 70), (70, 71), (71, 210)], 200):
        parts = (old, [coded.tokens[place]]), (new, coded.tokens[start:stop])
        row, chunk = driver.step(*parts, decoding=1)
        assert coded.near(row[0], coded.whole[place])
        logits.append(chunk)
    assert coded.near(torch.cat(logits), coded.whole[:210])


def test_a_sequence_that_lost_its_cache_is_computed_anew(coded: Coded) -> None:
    """In another slot and other blocks, beside garbage of bytes that are no numbers."""
    driver = coded.driver()
    lost = driver.start()
    driver.step((lost, coded.tokens[:180]))
    driver.decode(coded.tokens[180:184], lost)
    driver.finish(lost)
    kept = driver.start()
    driver.poison([kept])
    assert kept.slot != lost.slot or kept.blocks != lost.blocks
    driver.step((kept, coded.tokens[:184]))
    rest = driver.decode(coded.tokens[184:200], kept)
    assert coded.near(rest, coded.whole[184:200])


def test_drafts_that_do_not_hold_leave_no_trace(coded: Coded) -> None:
    driver = coded.driver()
    sequence = driver.start()
    driver.step((sequence, coded.tokens[:125]))
    for place in range(125, 135):
        driver.step((sequence, [coded.tokens[place], 7, 8, 9]), decoding=1)
        driver.reject(sequence, DRAFTS)
    rows = driver.step((sequence, coded.tokens[135:139]), decoding=1)[0]
    assert coded.near(rows, coded.whole[135:139])


@pytest.mark.parametrize("keys", ["fp8", "fp4"])
def test_an_engine_gives_each_request_what_it_gets_alone(
    tmp_path_factory: pytest.TempPathFactory, keys: str
) -> None:
    """Requests have room for their prompts at once, and outgrow it: some are preempted."""
    config = tiny_config(**layers(0, 4, 128), **WIDTHS)
    weights = random_model(tmp_path_factory.mktemp("engine") / "model", config, seed=2)
    settings = EngineSettings(
        device="cpu",
        kv_cache_dtype="fp8",
        index_cache_dtype=keys,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=100,
        num_blocks_override=5,
        threads=1,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [weights.tokens(length, seed=length) for length in (121, 118, 124, 126)]
    with Engine.load(weights.directory, settings, check_every_step=True) as engine:
        alone = [generate(engine, [prompt], sampling)[0] for prompt in prompts]
        assert engine.stats().num_preemptions == 0
        together = generate(engine, prompts, sampling)
        assert engine.stats().num_preemptions > 0
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


@pytest.mark.parametrize("caches", [CacheFormats("v4_fp8", "index_fp8"), FP32_CACHES], ids=str)
def test_the_ledger_counts_what_is_allocated(caches: CacheFormats) -> None:
    arch = read_arch("pebble")
    storage = CacheStorage(
        arch, num_slots=3, num_blocks=7, formats=caches, draft_rows=2, device="cpu"
    )
    counted = state_bytes(arch, 3, caches, 2) + 7 * block_bytes(arch, caches)
    assert storage.nbytes == counted


def test_bytes_of_a_token_are_those_of_the_released_model() -> None:
    """21 layers keep an entry and an index key for each 4 tokens, 20 an entry for each 128."""
    flash = read_arch("deepseek-v4-flash")
    for keys, size in (("index_fp8", 132), ("index_fp4", 68)):
        token = 21 * (592 + size) / 4 + 20 * 592 / 128
        assert block_bytes(flash, CacheFormats("v4_fp8", keys)) == 128 * token


def test_other_formats_than_the_model_s_are_refused(coded: Coded) -> None:
    plain = Driver(coded.model, coded.weights.arch, draft_rows=DRAFTS)
    with pytest.raises(MetainferError, match="keeps latents as dense, the model as v4_fp8"):
        plain.run([1, 2, 3])


def test_rows_that_no_format_holds_are_refused() -> None:
    arch = tiny_arch()
    with pytest.raises(UserError, match="fp8 keeps latents of 512 channels, 64 of them"):
        cache_formats(arch, "fp8", "float32")
    with pytest.raises(UserError, match="fp4 keeps index keys of 128 channels; those of .* 16"):
        cache_formats(arch, "bfloat16", "fp4")
    sliding = tiny_arch(**layers(0, 0))
    assert cache_formats(sliding, "bfloat16", "fp4") == CacheFormats("bfloat16", "index_fp4")
