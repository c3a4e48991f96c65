"""The attention side of every known model, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from metainfer.arch.families import known_names, read_arch, read_attention, read_config
from metainfer.core.errors import CheckpointError

NAMES = ("deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5.3", "pebble")
KNOWN = Path(__file__).parents[2] / "metainfer/arch/known"


def changed(tmp_path: Path, name: str, inner: str = "", **changes: Any) -> Path:
    """A copy of a known config with other values; None removes a key."""
    config = read_config(KNOWN / f"{name}.json")
    part = config[inner] if inner else config
    for key, value in changes.items():
        part[key] = value
        if value is None:
            del part[key]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_attention(path)
    return caught.value.message


def test_every_known_name_has_one() -> None:
    assert set(known_names()) == set(NAMES)
    for name in NAMES:
        assert read_attention(name).name == name


def test_v4_flash() -> None:
    side = read_attention("deepseek-v4-flash")
    kinds = Counter((layer.ratio, layer.topk, layer.overlap) for layer in side.layers)
    assert kinds == {(0, 0, False): 2, (4, 512, True): 21, (128, 0, False): 20}
    assert len(side.owners()) == 41
    assert len(side.choosers()) == 21
    assert (side.heads, side.key_width, side.window) == (64, 512, 128)


def test_v41_flash_shares_entries_and_lists() -> None:
    side = read_attention("deepseek-v4.1-flash")
    assert [layer.index for layer in side.owners()] == [2, 8, 14, 20]
    assert [layer.index for layer in side.choosers()] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.index for layer in side.layers if layer.publishes] == [20]
    assert [layer.index for layer in side.layers if layer.searches] == [24, 28, 32, 36]
    ratios = Counter(layer.ratio for layer in side.layers)
    assert ratios == {0: 2, 2: 18, 1: 20}
    assert side.streams is not None
    assert side.streams.shifted
    assert (side.eps, side.indexer.candidate_blocks, side.activation_group) == (1e-20, 2048, 32)


def test_v32_and_glm_absorb() -> None:
    v32, glm = read_attention("deepseek-v3.2"), read_attention("glm-5.3")
    assert (v32.heads, v32.query_width, v32.key_width, v32.output_width) == (128, 192, 576, 128)
    assert (glm.heads, glm.query_width, glm.key_width, glm.output_width) == (64, 256, 576, 256)
    assert v32.score_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert glm.score_scale == 256**-0.5
    assert len(v32.choosers()) == 61
    assert [layer.index for layer in glm.choosers()] == [0, 1, 2, *range(6, 75, 4)]
    assert not v32.indexer.interleaved
    assert glm.indexer.interleaved


def test_a_list_of_indexers_overrides_the_rule(tmp_path: Path) -> None:
    kinds = ["full"] + ["shared"] * 77
    side = read_attention(changed(tmp_path, "glm-5.3", indexer_types=kinds))
    assert [layer.index for layer in side.choosers()] == [0]


@pytest.mark.parametrize("name", ["deepseek-v4.1-flash", "deepseek-v3.2", "glm-5.3"])
def test_what_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((KNOWN / f"{name}.json").read_text())
    for given in (name, tmp_path):
        with pytest.raises(CheckpointError, match="is not served yet: the kernels of its") as error:
            read_arch(given)
        assert "kernels coverage" in str(error.value.hint)
    assert read_attention(tmp_path).layers == read_attention(name).layers


def test_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = refusal(changed(tmp_path, "deepseek-v3.2", q_lora_rank=None, kv_lora_rank=256))
    assert "missing keys: q_lora_rank" in text
    assert "kv_lora_rank is 256; only 512 is handled" in text
    text = refusal(changed(tmp_path, "deepseek-v3.2", rope_scaling={"factor": 4}))
    assert "rope_scaling must be null, or an object with factor" in text
    text = refusal(changed(tmp_path, "glm-5.3", indexer_types=["full"]))
    assert "indexer_types must be a list of 78" in text
    text = refusal(changed(tmp_path, "glm-5.3", indexer_types=["shared"] * 78))
    assert "the first layer has no indexer" in text
    v41 = "deepseek-v4.1-flash"
    text = refusal(changed(tmp_path, v41, "text_config", compress_ratios=[0, 3]))
    assert "compress_ratios has 2 entries; 40 are expected" in text
    assert "compress_ratios has [3]" in text
    text = refusal(changed(tmp_path, v41, "text_config", kv_source_layer_ids=[8]))
    assert "layer 2 has a ratio and no layer before it owns entries" in text
    assert "text_config must be an object" in refusal(changed(tmp_path, v41, text_config=None))


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.3"])
def test_a_number_of_layers_that_would_fill_the_memory_is_refused(
    name: str, tmp_path: Path
) -> None:
    said = refusal(changed(tmp_path, name, num_hidden_layers=10**12))
    assert "num_hidden_layers is 1000000000000; at most 1024 are handled" in said
