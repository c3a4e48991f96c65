"""The ledger of a rank: what fits where, what it says where it does not, and sums that add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.arch.cache_kinds import cache_kinds
from metainfer.arch.families import read_arch
from metainfer.arch.shape_of import read_shape, shape_of_v4
from metainfer.arch.shapes import ModelShape
from metainfer.arch.side_caches import kinds_of, sources_of
from metainfer.arch.split import split_dimension
from metainfer.arch.stages import stage_layers
from metainfer.arch.stored import tensors_of
from metainfer.arch.tiny import tiny_quantised_arch
from metainfer.core.errors import UserError
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Machine, Memory
from metainfer.ops.cache_formats import cache_formats
from metainfer.plan.kv_by_rank import blocks_of_rank, stage_caches
from metainfer.plan.layouts import Formats, Layout, Layouts, layouts_of
from metainfer.plan.ledger import activation_bytes, block_bytes, state_bytes, weights_bytes
from metainfer.plan.ledger_ranks import RankLedgers, most_context, most_sequences, rank_ledger
from metainfer.plan.rank_lines import RankLedger, ledger_text
from metainfer.plan.rank_sums import Demand, RankSums
from metainfer.plan.settings import Residency
from metainfer.plan.step_bytes import step_widths
from metainfer.plan.weights_by_rank import (
    GROUPS,
    Share,
    division,
    keys_of,
    stage_weights,
    weight_parts,
)
from metainfer.plan.workload import Workload

GIB = 2**30
MILLION = 1_048_576
V4, V41, V32, GLM = map(
    read_shape, ("deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2", "glm-5.3")
)
SHAPES = {shape.name: shape for shape in (V4, V41, V32, GLM)}
CARDS_84, CARDS_96 = machine_of("rtx-6000d-x8"), machine_of("rtx-pro-6000-x8")
LEDGERS = RankLedgers()


def both(**sizes: int) -> Layouts:
    return Layouts(Layout(**sizes), Layout(**sizes))


def at(tokens: int, requests: int = 1) -> Workload:
    return Workload(tokens - 512, 512, requests)


def ledger(
    shape: ModelShape,
    machine: Machine,
    layouts: Layouts,
    workload: Workload | None = None,
    **formats: Any,
) -> RankLedger:
    return LEDGERS(shape, machine, layouts, workload or at(MILLION), Formats(**formats))


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_glm_with_a_million_tokens_on_cards_of_84_gb_needs_its_caches_divided(experts: str) -> None:
    whole = ledger(GLM, CARDS_84, both(tensor=8), experts=experts)
    assert not whole.fits
    assert 53e9 < whole.bytes_of("entries") < 54e9
    assert "entries" in whole.reason and "caches divided" in whole.reason
    assert "\n" not in whole.reason
    shards = ledger(GLM, CARDS_84, both(tensor=8, kv_shards=8), experts=experts)
    assert shards.fits and not shards.reason
    assert shards.bytes_of("entries") * 8 == whole.bytes_of("entries")
    longest = most_context(GLM, CARDS_84, both(tensor=8), at(8192), Formats(experts=experts))
    assert 100_000 < longest < MILLION


def test_glm_as_released_and_with_whole_attention_is_refused_with_numbers() -> None:
    released = ledger(GLM, CARDS_84, both(tensor=8))
    assert "181.2 GB" in released.reason and "4 bits" in released.reason
    sharded = Layout(context=8, kv_shards=8), Layout(tensor=8, kv_shards=8)
    replicated = ledger(GLM, CARDS_84, Layouts(*sharded), experts="nvfp4")
    heads = sum(replicated.bytes_of(name) for name in ("attention heads", "shared experts"))
    assert heads > 28e9
    assert "fits with heads divided in prefill too" in replicated.reason


def test_glm_in_nvfp4_on_cards_of_96_gb_is_near_the_published_context() -> None:
    """589,824 tokens on eight RTX PRO 6000 (user-reports D1)."""
    formats = Formats(experts="nvfp4", chunk_rows=1024)
    found = most_context(GLM, CARDS_96, both(tensor=8), at(8192), formats)
    assert abs(found / 589_824 - 1) < 0.2


def test_v41_on_cards_of_84_gb() -> None:
    eight = ledger(V41, CARDS_84, both(tensor=8), engram="gpu")
    assert eight.fits and not eight.host_lines
    assert round(eight.bytes_of("Engram tables") * 8 / 1e9, 1) == 202.8
    four = ledger(V41, CARDS_84, both(tensor=4), engram="gpu")
    assert not four.fits and "Engram tables in host memory" in four.reason
    host = ledger(V41, CARDS_84, both(tensor=4), engram="host")
    assert host.fits and round(host.host_bytes / 1e9, 1) == 202.8
    disk = ledger(V41, CARDS_84, both(tensor=4), engram="disk")
    assert disk.fits and disk.host_bytes == 40 * GIB


def test_tables_that_the_host_cannot_hold() -> None:
    small = replace(CARDS_84, memory=Memory(128 * GIB, 100 * GIB, None))
    refused = ledger(V41, small, both(tensor=4), engram="host")
    assert refused.free_bytes > 0 and not refused.fits
    assert "the host would need 202.8 GB" in refused.reason


def test_v4_flash_on_two_cards_of_96_gb_holds_a_million_tokens() -> None:
    """4.2 to 4.7 GiB are free at one site with a million tokens (user-reports D10)."""
    pair = machine_of("rtx-pro-6000-x2")
    held = ledger(V4, pair, both(tensor=2), at(MILLION), draft=1)
    assert held.fits and 4 < held.free_bytes / GIB < 12
    assert not ledger(V4, machine_of("rtx-4090-x4"), both(tensor=4), at(8192)).fits
    assert most_sequences(V4, pair, both(tensor=2), at(8192), Formats()) > 64


def test_one_rank_is_what_the_ledger_of_the_engine_counts() -> None:
    arch = V4.arch
    assert arch is not None
    one = ledger(V4, machine_of("h200-x1"), both(), at(65536, 4), latents="fp8", index_keys="fp8")
    weights = sum(one.bytes_of(group) for group in GROUPS)
    assert weights == weights_bytes(arch, Residency.QUANTISED, "bfloat16")
    caches = cache_formats(arch, "fp8", "fp8")
    grown = one.bytes_of("entries") + one.bytes_of("index keys")
    assert grown == 4 * blocks_of_rank(65536, 1) * block_bytes(arch, caches)
    rings = one.bytes_of("window rings") + one.bytes_of("compressor states")
    assert rings == state_bytes(arch, 4, caches, 0)
    alone = activation_bytes(arch, 8192, 1, 128, "bfloat16", workspace_bytes=0)
    assert 0.95 < one.bytes_of("activations") / alone <= 1


@pytest.mark.parametrize("name", SHAPES)
def test_groups_of_weights_sum_to_all_that_is_loaded(name: str) -> None:
    """A tensor is in one group; shares of all ranks are at least the whole."""
    shape = SHAPES[name]
    parts = weight_parts(shape, Formats(draft=1))
    assert {part.group for part in parts} <= set(GROUPS)
    stored = sum(
        spec.nbytes
        for spec in tensors_of(shape)
        if not spec.name.startswith(("vision", "aligner", "image_"))
        and "61.embed_tokens" not in spec.name
        and "61.shared_head.head" not in spec.name
    )
    kept = sum(part.bytes for part in parts)
    # Routers, compressors and norms are kept as fp32 where their products are.
    assert stored <= kept < stored * 1.01
    layouts = both(tensor=4, pipeline=2, expert=2)
    stages = stage_layers(shape.num_layers, 2)
    held = Counter[str]()
    for stage in range(2):
        for group, size in stage_weights(shape, parts, division(layouts), stages, stage).items():
            held[group] += 4 * size
    whole = Counter[str]()
    for part in parts:
        whole[part.group] += part.bytes * (4 if part.share is Share.WHOLE else 1)
    for group in set(whole) - {"drafting blocks"}:
        assert whole[group] <= held[group] < whole[group] + 4096, group


def test_v4_is_divided_as_the_model_divides_it() -> None:
    divided = {Share.TENSOR, Share.EXPERTS}
    for spec in tensors_of(V4, every_expert=False):
        for (_, share, place), _ in keys_of(V4, spec, draft=False):
            dimension = split_dimension(spec.name)
            assert (share in divided) == (dimension is not None), (spec.name, place)


def test_caches_of_v4_are_those_that_the_engine_allocates() -> None:
    for arch in (read_arch("deepseek-v4-flash"), tiny_quantised_arch()):
        assert Counter(kinds_of(shape_of_v4(arch), 2)) == Counter(cache_kinds(arch, 2))


@pytest.mark.parametrize(
    ("shape", "index_keys", "bytes_of_a_token"),
    [(V41, "fp4", 890), (V32, "fp8", 48_068), (GLM, "fp8", 53_940)],
)
def test_bytes_of_a_token_are_the_published_ones(
    shape: ModelShape, index_keys: str, bytes_of_a_token: int
) -> None:
    formats = Formats(index_keys=index_keys)
    caches = stage_caches(shape, formats, 0, range(shape.num_layers))
    assert caches.token_block == 128 * bytes_of_a_token
    plain = stage_caches(shape, replace(formats, latents="bfloat16", index_keys="bfloat16"), 0,
                         range(shape.num_layers))  # fmt: skip
    assert plain.token_block > caches.token_block


def test_rings_and_stages_of_v41() -> None:
    caches = stage_caches(V41, Formats(), 0, range(40))
    assert caches.sequence_bytes["window rings"] == 40 * 128 * 528
    assert caches.sequence_bytes["compressor states"] == 3 * 2 * 2 * 512 * 4
    # Layers from 20 on read the entries of layer 20, those of a stage before have copies.
    assert sources_of(V41.side, range(30, 40)) == {20, *range(30, 40)}
    late = stage_caches(V41, Formats(), 0, range(30, 40))
    assert late.block_bytes == {"entries": 128 * 288, "index keys": 128 * 132}


def test_drafting_layers_of_glm_keep_entries_and_are_loaded_once() -> None:
    without, drafts = (ledger(GLM, CARDS_96, both(tensor=8), draft=tokens) for tokens in (0, 1))
    assert without.bytes_of("drafting caches") == 0
    assert drafts.bytes_of("drafting caches") == 8192 * 128 * (656 + 132)
    assert 9.9e9 < drafts.bytes_of("drafting blocks") * 8 < 22e9


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1024, 163_840),
    requests=st.integers(1, 16),
    group=st.sampled_from([1, 2, 4]),
    expert=st.sampled_from([1, 2]),
)
def test_more_ranks_need_no_more_of_what_is_divided(
    name: str, tokens: int, requests: int, group: int, expert: int
) -> None:
    shape, work = SHAPES[name], at(tokens, requests)
    expert = min(expert, group)
    fewer = both(tensor=group, expert=expert, kv_shards=group)
    more = both(tensor=2 * group, expert=expert, kv_shards=2 * group)
    small, large = (
        ledger(shape, CARDS_96, layouts, work, engram="gpu", draft=1) for layouts in (fewer, more)
    )
    for line in large.lines:
        if line.name != "communication":
            assert line.bytes <= small.bytes_of(line.name), line
    for divided in ("routed experts", "attention heads", "head", "entries"):
        assert large.bytes_of(divided) < small.bytes_of(divided)
        assert 2 * large.bytes_of(divided) >= small.bytes_of(divided)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 64))
def test_shards_of_a_sequence_hold_all_its_blocks(tokens: int, shards: int) -> None:
    each = blocks_of_rank(tokens, shards)
    assert each * shards >= blocks_of_rank(tokens, 1) > (each - 1) * shards


def test_stages_have_every_layer_once() -> None:
    for layers in (1, 40, 43, 61, 78):
        for stages in range(1, min(8, layers) + 1):
            parts = stage_layers(layers, stages)
            assert [n for part in parts for n in part] == list(range(layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_pipeline_shows_its_fullest_stage() -> None:
    staged = ledger(V4, CARDS_96, both(pipeline=4), at(8192))
    whole = ledger(V4, machine_of("b300-x8"), both(), at(8192))
    assert staged.fits
    assert staged.bytes_of("routed experts") < whole.bytes_of("routed experts") / 3.8
    assert staged.bytes_of("communication") > 0 == whole.bytes_of("communication")


@pytest.mark.parametrize("name", SHAPES)
def test_what_fits_at_most_fits_and_no_more(name: str) -> None:
    shape, sums, formats = SHAPES[name], RankSums(), Formats(experts="mxfp4")
    layouts = both(tensor=4)
    work = at(8192, 2)
    most = most_context(shape, CARDS_96, layouts, work, formats)
    for tokens, fits in ((most, True), (most + 128, False)):
        if 0 < tokens < shape.side.max_model_len:
            demand = Demand(2, tokens, min(tokens, 8192))
            assert sums.of(shape, CARDS_96, layouts, demand, formats).fits is fits
    count = most_sequences(shape, CARDS_96, layouts, work, formats)
    for requests, fits in ((count, True), (count + 1, False)):
        if requests:
            assert (
                ledger(shape, CARDS_96, layouts, at(8192, requests), experts="mxfp4").fits is fits
            )


def test_every_layout_has_a_ledger_and_a_refusal_names_the_largest_line() -> None:
    for layouts in layouts_of(8):
        found = ledger(GLM, CARDS_84, layouts, at(131_072, 4), experts="nvfp4")
        if found.fits:
            assert found.total_bytes <= found.limit_bytes and not found.reason
        else:
            assert max(found.lines, key=lambda line: line.bytes).name in found.reason


def test_replicas_divide_the_requests() -> None:
    two = ledger(V4, CARDS_96, both(tensor=4, replicas=2), at(8192, 9))
    alone = ledger(V4, CARDS_96, both(tensor=4), at(8192, 5))
    assert two.lines == alone.lines


@pytest.mark.parametrize("shape", [V41, GLM])
def test_the_table_is_at_most_100_columns(shape: ModelShape) -> None:
    for layouts in (both(tensor=8), Layouts(Layout(context=8), Layout(tensor=8))):
        found = ledger(shape, CARDS_84, layouts, at(MILLION, 300), engram="host", draft=1)
        lines = ledger_text(found)
        assert max(map(len, lines)) <= 100
        text = "\n".join(lines)
        assert all(line.name in text for line in (*found.lines, *found.host_lines))


@pytest.mark.parametrize(
    ("formats", "said"),
    [({"experts": "int3"}, "int3"), ({"linear": "fp4"}, "fp4"), ({"latents": "int4"}, "int4"),
     ({"index_keys": "none"}, "none")],
)  # fmt: skip
def test_words_that_are_no_formats_are_named(formats: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        ledger(GLM, CARDS_84, both(tensor=8), **formats)
    assert said in caught.value.message and caught.value.hint


def test_a_layout_with_more_gpus_than_there_are() -> None:
    with pytest.raises(UserError, match="needs 16 GPUs, and there are 8"):
        rank_ledger(V4, CARDS_84, both(tensor=16), at(8192), Formats())


def test_widths_of_a_rank() -> None:
    whole, part = step_widths(GLM), step_widths(GLM, tensor=8, expert=2, expert_slices=4)
    assert (whole.heads, part.heads) == (64 * (256 + 256 + 576 + 512), 8 * 1600)
    assert (whole.expert, part.expert, part.expert_share) == (2048, 512, 1.0)
