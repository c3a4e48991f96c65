"""Formats that a plan chooses between: caches, rows between ranks, drafted tokens."""

from __future__ import annotations

import pytest

from metainfer.arch.cache_kinds import BLOCK_TOKENS, Scope, cache_kinds
from metainfer.arch.families import known_names
from metainfer.arch.shape_of import read_shape
from metainfer.ops.cache_formats import CODED_KEYS, cache_formats
from metainfer.plan.caches import cache_dtypes
from metainfer.plan.kv_by_rank import row_formats, stage_caches
from metainfer.plan.layouts import Formats
from metainfer.plan.settings import EngineSettings


@pytest.mark.parametrize("model", known_names())
def test_index_keys_have_one_default(model: str) -> None:
    """A plan of layouts counts what the engine keeps beside coded latents."""
    side = read_shape(model).side
    _, keys = cache_dtypes(EngineSettings(kv_cache_dtype="fp8"), "bfloat16")
    said = row_formats(side, Formats(latents="fp8", index_keys=keys.value))
    assert keys.value == CODED_KEYS
    assert row_formats(side, Formats(latents="fp8")).entries == said.entries
    assert side.indexer.key_formats[0] == said.entries.index_keys


def test_plan_and_engine_count_the_same_bytes_of_a_block() -> None:
    shape = read_shape("deepseek-v4-flash")
    assert shape.arch is not None
    kept = cache_formats(shape.arch, "fp8", CODED_KEYS)
    growing = stage_caches(shape, Formats(), 0, range(shape.num_layers)).token_block
    kinds = [kind for kind in cache_kinds(shape.arch) if kind.scope is Scope.TOKENS]
    assert growing == sum(kind.rows_per_block * kept.row_bytes(kind) for kind in kinds)
    assert growing / BLOCK_TOKENS < 21 * (592 + 132) / 4 + 20 * 592 / 128 + 1
