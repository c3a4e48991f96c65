"""The list of tensors, against the published totals, and the split over ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from metainfer.arch.families import read_arch
from metainfer.arch.manifest import iterate, manifest, total_bytes
from metainfer.arch.split import COLUMNS, ROWS, check_split, rank_shape, split_dimension
from metainfer.arch.tiny import tiny_arch, tiny_quantised_arch
from metainfer.core.dtypes import DType
from metainfer.core.errors import UserError


def test_v4_flash_totals_are_the_release() -> None:
    arch = read_arch("deepseek-v4-flash")
    specs = manifest(arch)
    assert len(specs) == 69_187
    assert sum(spec.nbytes for spec in specs.values()) == 159_609_485_896
    assert sum(name.startswith("mtp.0.") for name in specs) == 1_575
    expert = [s.nbytes for s in specs.values() if s.name.startswith("layers.9.ffn.experts.7.")]
    assert sum(expert) == 13_369_344


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", DType.BF16, (129280, 4096)),
        ("hc_head_fn", DType.F32, (4, 16384)),
        ("layers.0.hc_ffn_fn", DType.F32, (24, 16384)),
        ("layers.0.ffn.gate.tid2eid", DType.I64, (129280, 6)),
        ("layers.3.ffn.gate.bias", DType.F32, (256,)),
        ("layers.1.attn.wo_a.weight", DType.F8_E4M3, (8192, 4096)),
        ("layers.1.attn.wo_a.scale", DType.F8_E8M0, (64, 32)),
        ("layers.2.attn.compressor.ape", DType.F32, (4, 1024)),
        ("layers.3.attn.compressor.wkv.weight", DType.BF16, (512, 4096)),
        ("layers.2.attn.indexer.compressor.norm.weight", DType.BF16, (128,)),
        ("layers.42.ffn.experts.255.w2.weight", DType.I8, (4096, 1024)),
        ("layers.42.ffn.experts.255.w2.scale", DType.F8_E8M0, (4096, 64)),
        ("mtp.0.e_proj.scale", DType.F8_E8M0, (32, 32)),
    ],
)
def test_v4_flash_tensors(name: str, dtype: DType, shape: tuple[int, ...]) -> None:
    spec = next(s for s in iterate(read_arch("deepseek-v4-flash")) if s.name == name)
    assert (spec.dtype, spec.shape) == (dtype, shape)
    assert spec.nbytes == math.prod(shape) * dtype.size_bytes


def test_which_layer_has_what() -> None:
    specs = manifest(tiny_quantised_arch())
    assert "layers.1.attn.compressor.ape" not in specs
    assert "layers.3.attn.indexer.wq_b.weight" not in specs
    assert "layers.3.attn.compressor.ape" in specs
    assert "layers.0.ffn.gate.bias" not in specs
    assert "mtp.0.ffn.gate.bias" in specs
    assert len(specs) == len(list(iterate(tiny_quantised_arch())))


def test_plain_models_have_no_scales() -> None:
    for dtype, stored in (("float32", {DType.F32}), ("bfloat16", {DType.F32, DType.BF16})):
        specs = manifest(tiny_arch(torch_dtype=dtype))
        assert not any(name.endswith(".scale") for name in specs)
        assert {spec.dtype for spec in specs.values()} == stored | {DType.I64}
    assert total_bytes(tiny_arch()) > total_bytes(tiny_arch(torch_dtype="bfloat16"))


def test_fp8_blocks_at_the_edge_are_counted_up() -> None:
    specs = manifest(tiny_quantised_arch(hidden_size=160))
    assert specs["layers.0.attn.wq_a.scale"].shape == (1, 2)


def test_dspark_tensors_are_not_described() -> None:
    arch = tiny_quantised_arch(compress_ratios=[0, 0, 4, 128, 4, 0, 0, 0], dspark_block_size=5)
    assert not any(spec.name.startswith("mtp.") for spec in iterate(arch))


def test_split_table() -> None:
    dimensions = {
        "layers.7.attn.wq_b.weight": ROWS,
        "layers.7.attn.wq_b.scale": ROWS,
        "layers.7.attn.attn_sink": ROWS,
        "layers.7.attn.wo_a.weight": ROWS,
        "layers.7.attn.wo_b.scale": COLUMNS,
        "layers.7.ffn.experts.31.w1.weight": ROWS,
        "layers.7.ffn.experts.31.w2.scale": COLUMNS,
        "layers.7.ffn.shared_experts.w3.weight": ROWS,
        "head.weight": ROWS,
        "embed.weight": None,
        "layers.7.attn.indexer.wq_b.weight": None,
        "layers.7.attn.wq_a.weight": None,
        "layers.7.attn.wkv.weight": None,
        "layers.7.attn.compressor.wkv.weight": None,
        "layers.7.ffn.gate.weight": None,
        "layers.7.ffn.gate.bias": None,
        "layers.7.hc_attn_fn": None,
    }
    assert {name: split_dimension(name) for name in dimensions} == dimensions


def test_v4_flash_over_8_ranks() -> None:
    """8 heads, one output group and an expert width of 256 on each rank."""
    arch = read_arch("deepseek-v4-flash")
    check_split(arch, 8)
    shapes = {s.name: rank_shape(s.name, s.shape, 8) for s in iterate(arch)}
    assert shapes["layers.5.attn.wq_b.weight"] == (4096, 1024)
    assert shapes["layers.5.attn.wo_a.weight"] == (1024, 4096)
    assert shapes["layers.5.attn.wo_b.weight"] == (4096, 1024)
    assert shapes["layers.5.ffn.experts.0.w1.weight"] == (256, 2048)
    assert shapes["layers.5.ffn.experts.0.w2.scale"] == (4096, 8)
    assert shapes["layers.5.ffn.shared_experts.w2.scale"] == (32, 2)
    divided = Counter(split_dimension(name) for name in shapes)
    assert divided[COLUMNS] == 43 * 2 * (1 + 256 + 1)


@pytest.mark.parametrize(
    ("size", "changes", "expected"),
    [
        (3, {}, "attention heads: 8 is not a multiple of 3"),
        (2, {"o_groups": 1}, "output groups: 1 is not a multiple of 2"),
        (2, {"vocab_size": 511}, "vocabulary rows: 511 is not a multiple of 2"),
        (
            4,
            {"o_groups": 4, "moe_intermediate_size": 384, "expert_dtype": "fp8"},
            "width of the shared expert: 384 / 4 = 96 is not a multiple of 128 nor an even part",
        ),
        (8, {"o_groups": 8}, "width of the routed experts: 128 / 8 = 16 is not a multiple of 32"),
        (
            8,
            {"o_groups": 8, "head_dim": 96},
            "rows of wq_b: 768 / 8 = 96 is not a multiple of 128 nor an even part",
        ),
    ],
)
def test_sizes_that_do_not_divide(size: int, changes: dict[str, Any], expected: str) -> None:
    arch = tiny_quantised_arch(num_attention_heads=8, **changes)
    with pytest.raises(UserError) as caught:
        check_split(arch, size)
    assert expected in caught.value.message
