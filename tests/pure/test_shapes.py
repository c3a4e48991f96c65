"""Shapes and lists of tensors of all models that can be planned for, against published totals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from metainfer.arch.families import read_arch
from metainfer.arch.manifest import total_bytes
from metainfer.arch.record import Quantisation, WeightFormat
from metainfer.arch.shape_of import read_shape
from metainfer.arch.stored import tensors_of
from metainfer.core.dtypes import DType

MODELS = ("deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2", "glm-5.3")


def total(name: str, chosen: Callable[[str], bool] = lambda name: True) -> int:
    return sum(spec.nbytes for spec in tensors_of(read_shape(name)) if chosen(spec.name))


def test_v4_flash_is_the_manifest_of_the_served_model() -> None:
    assert total("deepseek-v4-flash") == 159_609_485_896
    assert total("deepseek-v4-flash") == total_bytes(read_arch("deepseek-v4-flash"))


def test_glm_in_bf16_is_the_release_to_the_byte() -> None:
    assert total("glm-5.3") == 1_506_659_919_872
    draft = total("glm-5.3", lambda name: name.startswith("model.layers.78."))
    assert round(draft / 2e9, 2) == 9.95
    indexers = {
        spec.name.split(".")[2]
        for spec in tensors_of(read_shape("glm-5.3"), every_expert=False)
        if ".indexer." in spec.name
    }
    assert len(indexers) == 21 + 1  # and the drafting layer


@pytest.mark.parametrize(
    ("part", "gigabytes"),
    [("backbone", 298.31), ("engram", 203.07), ("mtp", 7.93), ("vision", 0.97), ("all", 510.29)],
)
def test_v41_adds_up_to_what_was_published(part: str, gigabytes: float) -> None:
    def part_of(name: str) -> str:
        if ".engram." in name:
            return "engram"
        first = re.split(r"[._]", name, maxsplit=1)[0]
        return {"mtp": "mtp", "vision": "vision", "aligner": "vision", "image": "vision"}.get(
            first, "backbone"
        )

    found = total("deepseek-v4.1-flash", lambda name: part in ("all", part_of(name)))
    assert round(found / 1e9, 2) == gigabytes


def test_v32_is_about_what_was_published() -> None:
    assert round(total("deepseek-v3.2") / 1e9) == 689


def test_an_expert_of_v41_and_the_biases_of_its_router() -> None:
    specs = {spec.name: spec for spec in tensors_of(read_shape("deepseek-v4.1-flash"))}
    expert = [s.nbytes for s in specs.values() if s.name.startswith("layers.9.ffn.experts.7.")]
    assert sum(expert) == 18_800_640
    assert specs["layers.0.ffn.gate.bias_vl"].shape == (384,)
    assert specs["mtp.2.ffn.gate.bias"].shape == (128,)
    assert specs["layers.3.attn.wo_a.scale"].shape == (256, 128)
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.3.attn.indexer.wq_b.weight" not in specs
    assert specs["layers.14.engram.embed.weight"].shape == (384_016_682, 256)


@pytest.mark.parametrize("name", MODELS)
def test_one_expert_may_stand_for_all(name: str) -> None:
    """Names are unique, and a list with one expert of each layer says as much."""
    shape = read_shape(name)
    every = [spec.name for spec in tensors_of(shape)]
    assert len(every) == len(set(every))
    few = [spec.name for spec in tensors_of(shape, every_expert=False)]
    assert few == [n for n in every if ".experts." not in n or ".experts.0." in n]


@pytest.mark.parametrize(
    ("experts", "bits"),
    [(WeightFormat.NVFP4, 4.5), (WeightFormat.FP4_GROUP, 4.25), (WeightFormat.BF16, 16)],
)
def test_experts_in_other_formats(experts: WeightFormat, bits: float) -> None:
    """724.8 billion weights of routed experts; NVFP4 has four bytes more for each matrix."""
    stored = Quantisation(WeightFormat.BF16, experts)
    found = 0
    for spec in tensors_of(read_shape("glm-5.3"), stored):
        if ".experts." in spec.name and ".layers.78." not in spec.name:
            found += spec.nbytes
    weights = 75 * 256 * 3 * 6144 * 2048
    matrices = 75 * 256 * 3
    spare = 4 * matrices if experts is WeightFormat.NVFP4 else 0
    assert found == math.floor(weights * bits / 8) + spare


def test_linear_matrices_in_fp8_have_a_scale_for_each_block() -> None:
    stored = Quantisation(WeightFormat.FP8_BLOCK, WeightFormat.NVFP4, fp8_scale_dtype=DType.F32)
    specs = {s.name: s for s in tensors_of(read_shape("glm-5.3"), stored, every_expert=False)}
    assert specs["model.layers.0.self_attn.o_proj.scale"].shape == (48, 128)
    assert specs["model.layers.0.self_attn.o_proj.scale"].dtype is DType.F32
    assert specs["lm_head.weight"].dtype is DType.BF16


def test_shapes_say_what_the_configs_say() -> None:
    v41, glm, v4 = map(read_shape, ("deepseek-v4.1-flash", "glm-5.3", "deepseek-v4-flash"))
    assert v41.engram is not None and v41.draft is not None and glm.draft is not None
    assert (v41.engram.row_bytes, v41.engram.rows_per_token) == (264, 24)
    assert (v41.draft.blocks, v41.draft.experts, v41.draft.rows) == (3, 128, 5)
    assert (glm.dense_layers, glm.dense_width, glm.draft.blocks) == (3, 12288, 1)
    assert (v4.hash_layers, v4.arch) == (3, read_arch("deepseek-v4-flash"))
    assert replace(v4, arch=None) != v4
