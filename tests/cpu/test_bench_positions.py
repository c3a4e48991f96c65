"""Sampled positions of a long prompt: what is right passes, and faults of every kind are named."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.arch.tiny import tiny_config
from metainfer.bench.positions import Checked, check_positions, closing_length, sample_positions
from metainfer.bench.positions_watch import CACHED, KEYS, PositionsWatch
from metainfer.bench.watched import Watched
from metainfer.core.errors import UserError
from metainfer.kernels.registry import Backend, Registry
from metainfer.llm.engine import load_model
from metainfer.models.deepseek_v4 import StepIndexer
from metainfer.nn.cache import CacheStorage
from metainfer.nn.rotary import RotaryTable
from metainfer.nn.step_index import DecodeWindows
from metainfer.ops.catalogue import OPS
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import model_dir

SETTINGS = EngineSettings(
    load_format="dummy", device="cpu", threads=1, max_model_len=1024, max_num_seqs=2,
    max_num_batched_tokens=128, num_blocks_override=12,
)  # fmt: skip
TOKENS, COUNT = 900, 8

INDEXING = sys.modules[StepIndexer.__module__]


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults read rows that nothing was written to: they find zeros there in every run, and not
    what memory held before, which may be anything."""
    allocate = CacheStorage.__init__

    def cleared(self: CacheStorage, *arguments: Any, **options: Any) -> None:
        allocate(self, *arguments, **options)
        for rows in self._rows.values():
            for part in rows:
                part.zero_()

    monkeypatch.setattr(CacheStorage, "__init__", cleared)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("positions")
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    return directory


def check(
    model: Path,
    settings: EngineSettings = SETTINGS,
    under: Callable[[Registry], Registry] = lambda registry: registry,
    tokens: int = TOKENS,
    count: int = COUNT,
) -> Checked:
    """`under`: what the watcher watches instead of the machine's registry."""
    watch = PositionsWatch()
    loaded = load_model(model, settings, watched=lambda found: Watched(under(found), watch))
    return check_positions(loaded, watch, tokens, count, seed=0)


def test_all_layers_are_held_against_the_references(model: Path) -> None:
    checked = check(model)
    assert checked.wrong == ()
    assert (len(checked.positions), checked.positions[-2:]) == (COUNT + 1, (894, 895))
    seen = Counter((one.op, one.layer) for one in checked.findings)
    for layer in range(4):  # the last layer computes the last row of a chunk alone
        assert seen["attention.sparse_prefill", layer] == COUNT
    assert seen["attention.sparse_prefill", 4] >= 1
    for layer in range(5):
        assert seen["attention.sparse_decode", layer] == 1
    assert seen["attention.index_topk", 2] >= COUNT - 2
    assert seen["attention.index_topk_decode", 2] == 1
    assert seen["attention.compress", 3] >= 3
    steps = [seen["attention.compress_step", layer] for layer in range(5)]
    assert steps == [0, 0, 2, 1, 2], "of entries, and of index keys where there are any"
    assert {layer for op, layer in seen if op == CACHED} == {2, 3, 4}
    assert max(one.error for one in checked.findings) < 1e-5


@pytest.mark.parametrize(("latents", "keys"), [(None, None), ("fp8", "fp8"), ("fp8", "fp4")])
def test_the_shipped_model_passes(latents: str | None, keys: str | None) -> None:
    settings = EngineSettings(
        device="cpu", threads=1, max_model_len=1280, max_num_seqs=1, max_num_batched_tokens=512,
        kv_cache_dtype=latents, index_cache_dtype=keys,
    )  # fmt: skip
    checked = check(model_dir(None), settings, tokens=1100, count=4)
    assert checked.wrong == ()
    seen = {one.op for one in checked.findings}
    assert {"attention.index_topk", "attention.sparse_decode", CACHED, KEYS} <= seen
    assert ("cache.write" in seen) is (latents is not None)


def _entries_of_the_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StepIndexer._entry_rows

    def wrong(self: StepIndexer, table_BM: torch.Tensor, *others: int) -> torch.Tensor:
        return right(self, torch.cat([table_BM[:, 1:], table_BM[:, :1]], dim=1), *others)

    monkeypatch.setattr(StepIndexer, "_entry_rows", wrong)


def _window_one_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = INDEXING.ring_rows

    def wrong(chunks: Any, device: torch.device) -> Any:
        found = right(chunks, device)
        for chunk, (of_window, *_) in zip(chunks, found, strict=True):
            of_window.halo.sub_(1).remainder_(chunk.rings[0].size)  # slot 0 is the only one
        return found

    monkeypatch.setattr(INDEXING, "ring_rows", wrong)


def _window_of_decode_one_row_short(monkeypatch: pytest.MonkeyPatch) -> None:
    right = INDEXING._ring_rows

    def wrong(slots_T1: torch.Tensor, positions_TW: torch.Tensor, ring: int) -> torch.Tensor:
        rows_TW = right(slots_T1, positions_TW, ring)
        rows_TW[:, 0] = -1
        return rows_TW

    monkeypatch.setattr(INDEXING, "_ring_rows", wrong)


def _angles_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right up to 512, as an index of too few bits would be."""
    right = RotaryTable.rows

    def wrong(self: RotaryTable, positions_T: torch.Tensor, end: int) -> torch.Tensor:
        return right(self, positions_T if end > TOKENS + 1 else positions_T % 512, end)

    monkeypatch.setattr(RotaryTable, "rows", wrong)


def _planted_in_windows(monkeypatch: pytest.MonkeyPatch, **change: Callable[[Any], Any]) -> None:
    """Changes what decode steps read of one ratio."""
    right = DecodeWindows

    def wrong(**of: Any) -> DecodeWindows:
        return right(**of | {name: made(of[name]) for name, made in change.items()})

    monkeypatch.setattr(INDEXING, "DecodeWindows", wrong)


def _closing_rows_of_the_ring_late(monkeypatch: pytest.MonkeyPatch) -> None:
    _planted_in_windows(monkeypatch, closing_TS=lambda rows_TS: rows_TS.roll(1, dims=1))


def _entries_of_decode_one_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    _planted_in_windows(monkeypatch, target_rows_T=lambda rows_T: rows_T - 1)


@pytest.mark.parametrize(
    ("plant", "op"),
    [
        (_entries_of_the_next_block, CACHED),
        (_window_one_row_late, "attention.sparse_prefill"),
        (_window_of_decode_one_row_short, "attention.sparse_decode"),
        (_angles_that_stay, "rope.norm_rotate"),
        (_closing_rows_of_the_ring_late, "attention.compress_step"),
        (_entries_of_decode_one_row_late, CACHED),
    ],
)
def test_rows_and_angles_that_are_wrong_show(
    plant: Callable[[pytest.MonkeyPatch], None],
    op: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert op in {one.op for one in check(model).wrong}


def _spoilt(registry: Registry, op: str, spoil: Callable[[torch.Tensor], object]) -> Registry:
    """Backends of which those of `op` give something else."""

    def spoilt(backend: Backend, *arguments: Any) -> Any:
        result = backend.run(*arguments)
        spoil(result)
        return result

    backends = [backend for name in OPS for backend in registry.backends(name).values()]
    return Registry(
        replace(backend, run=partial(spoilt, backend)) if backend.op == op else backend
        for backend in backends
    )


def _choose_the_oldest(ids_TK: torch.Tensor) -> None:
    """The last row misses the best of the entries that it sees."""
    if int(ids_TK[-1, -1]) >= ids_TK.shape[1]:
        ids_TK[-1] = torch.arange(ids_TK.shape[1])


def _drop_the_newest(rows_TK: torch.Tensor) -> None:
    """The last row misses one of its entries, which decode names by their rows in the cache."""
    rows_TK[-1, -1] = -1


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        ("attention.sparse_prefill", lambda out_THD: out_THD[-1, 0, :4].mul_(1.5)),
        ("attention.compress", lambda entries_ED: entries_ED.mul_(1.01)),
        ("attention.compress_step", lambda entries_TD: entries_TD.mul_(1.01)),
        ("attention.index_topk", _choose_the_oldest),
        ("attention.index_topk_decode", _drop_the_newest),
    ],
)
def test_kernels_that_are_wrong_show(
    op: str, spoil: Callable[[torch.Tensor], object], model: Path
) -> None:
    wrong = check(model, under=lambda registry: _spoilt(registry, op, spoil)).wrong
    cached = {CACHED, KEYS} if op == "attention.compress" else set()
    assert {one.op for one in wrong} == {op} | cached
    assert all(one.error > one.tolerance for one in wrong)


def test_positions_are_spread_and_lie_behind_borders() -> None:
    chosen = sample_positions(10_000, 16, 512, seed=1)
    assert len(chosen) == 16 and chosen[-1] == 9_999
    assert sum(position % 512 < 8 for position in chosen) >= 6
    assert chosen != sample_positions(10_000, 16, 512, seed=2)
    assert sample_positions(3, 16, 512, seed=1) == (0, 1, 2)


def test_a_prompt_is_cut_where_windows_close() -> None:
    assert [closing_length(n, (4, 4, 128)) for n in (127, 128, 900, 1022, 1023)] == [
        127, 127, 895, 895, 1023
    ]  # fmt: skip
    assert closing_length(7, ()) == 7
    assert closing_length(7, (4,)) == 7
    assert closing_length(6, (4,)) == 3


def test_a_prompt_that_has_no_room_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match="the engine has room for 1024"):
        check(model, tokens=1024)
