"""The list of what a rank runs is what its layers bind."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.record import Arch
from metainfer.arch.tiny import tiny_arch, tiny_config, tiny_quantised_arch
from metainfer.core.errors import UserError
from metainfer.ops.cache_formats import CacheFormats, cache_formats
from metainfer.ops.catalogue import OPS
from metainfer.ops.use import DECODE, PARTS, PREFILL, Use
from metainfer.ops.uses import uses_of, usual_activations
from metainfer.ops.uses_v4 import ACTIVATIONS, served_uses
from tests.fakes.shapes_only import build_shapes

MODELS = {
    "deepseek-v4-flash": (read_arch("deepseek-v4-flash"), (1, 2, 4, 8)),
    "pebble": (read_arch("pebble"), (1,)),
    "tiny": (tiny_arch(), (1, 2)),
    "tiny, fp8 and fp4": (tiny_quantised_arch(), (1,)),
    "fp8 experts, fp32 scales": (tiny_quantised_arch(expert_dtype="fp8"), (1,)),
    "blocks that straddle": (tiny_quantised_arch(q_lora_rank=192), (1,)),
}
LAYOUTS = [
    pytest.param(arch, ranks, id=f"{name}, {ranks}")
    for name, (arch, layouts) in MODELS.items()
    for ranks in layouts
]


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(("arch", "ranks"), LAYOUTS)
def test_uses_are_what_the_model_binds(arch: Arch, ranks: int, activations: str) -> None:
    model = build_shapes(arch, ranks, activations=activations)
    bound = Counter((kernel.op, kernel.case) for kernel in model.kernels)
    uses = served_uses(arch, ranks, activations=activations)
    assert {(use.op, use.case): use.times for use in uses} == dict(bound)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("expert", [2, 8])
def test_uses_of_dealt_experts_are_what_the_model_binds(expert: int, activations: str) -> None:
    arch = MODELS["deepseek-v4-flash"][0]
    model = build_shapes(arch, 8, activations=activations, expert=expert)
    uses = served_uses(arch, 8, activations=activations, expert=expert)
    bound = {(kernel.op, kernel.case) for kernel in model.kernels}
    assert {(use.op, use.case) for use in uses} == bound
    (experts,) = (case for op, case in bound if op.startswith("moe.experts"))
    assert (experts.experts, experts.inner) == (256 // expert, 2048 * expert // 8)


@pytest.mark.parametrize(
    ("context", "kv_shards", "activations"), [(8, 1, "plain"), (1, 4, "plain"), (4, 2, "fp8")]
)
def test_uses_of_shared_tokens_and_caches_are_what_the_model_binds(
    context: int, kv_shards: int, activations: str
) -> None:
    arch, caches = MODELS["deepseek-v4-flash"][0], CacheFormats("v4_fp8", "index_fp8")
    shared: dict[str, Any] = {"context": context, "kv_shards": kv_shards}
    model = build_shapes(arch, 8, activations=activations, caches=caches, **shared)
    bound = Counter((kernel.op, kernel.case) for kernel in model.kernels)
    uses = served_uses(arch, 8, activations=activations, caches=caches, **shared)
    assert {(use.op, use.case): use.times for use in uses} == dict(bound)
    heads = {
        (phase, use.case.heads)
        for use in uses
        if use.op.startswith("attention.sparse_") and use.case.ratio
        for phase in use.phases
    }
    in_prefill = {(PREFILL, 8), (PREFILL, 8 * context)}
    assert heads == in_prefill | {(DECODE, 8 * kv_shards)}


def test_what_is_shared_must_divide_the_ranks() -> None:
    for flag, shared in (("prefill", {"context": 3}), ("decode", {"kv_shards": 3})):
        with pytest.raises(UserError, match=f"--{flag}-context-parallel-size 3 does not divide 8"):
            uses_of("deepseek-v4-flash", 8, **shared)
    with pytest.raises(UserError, match="of glm-5.3 the attention kernels alone are here"):
        uses_of("glm-5.3", 8, kv_shards=2)


def test_uses_in_fp32_are_what_the_model_binds() -> None:
    arch = tiny_arch()
    bound = {(kernel.op, kernel.case) for kernel in build_shapes(arch, 1, torch.float32).kernels}
    uses = served_uses(arch, 1, "float32", "float32")
    assert {(use.op, use.case) for use in uses} == bound


@pytest.mark.parametrize("keys", ["index_fp8", "index_fp4"])
@pytest.mark.parametrize("name", ["deepseek-v4-flash", "pebble"])
def test_uses_over_caches_of_bytes_are_what_the_model_binds(name: str, keys: str) -> None:
    arch, caches = MODELS[name][0], CacheFormats("v4_fp8", keys)
    bound = Counter(
        (kernel.op, kernel.case) for kernel in build_shapes(arch, 1, caches=caches).kernels
    )
    uses = served_uses(arch, 1, caches=caches)
    assert {(use.op, use.case): use.times for use in uses} == dict(bound)
    dense = {(use.op, use.case) for use in served_uses(arch, 1)}
    described = {(use.op, use.case) for use in uses_of(name, 1)}
    assert set(bound) - dense <= described


def test_formats_of_a_plan_say_what_is_served() -> None:
    def served(**formats: str) -> set[str]:
        uses = uses_of("deepseek-v4-flash", 1, "attention", **formats)
        return {use.op for use in uses if use.served}

    coded = {"cache.write", "cache.read", "cache.write_index", "index.encode_queries"}
    assert not coded & served()
    assert coded <= served(latents="fp8", index_keys="fp4")
    assert coded & served(latents="fp8") == {"cache.write", "cache.read"}
    with pytest.raises(UserError, match="fp8 keeps latents of 512 channels"):
        cache_formats(tiny_arch(), "fp8", "fp8")


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be divided over 3 ranks: attention heads: 64"):
        served_uses(read_arch("deepseek-v4-flash"), 3)


ATTENTION = ("deepseek-v4-flash", "deepseek-v4.1-flash", "deepseek-v3.2", "glm-5.3")


def _of_two_shards(arch: Arch) -> set[tuple[str, Any]]:
    """Of ranks that divide the caches of a sequence, in every format of keys; the second rank's."""
    formats = [cache_formats(arch, latents, keys) for latents, keys in _FORMATS]
    uses = [use for caches in formats for use in served_uses(arch, 2, caches=caches, kv_shards=2)]
    return {
        (use.op, replace(use.case, shard=1) if use.op == "step.index_decode" else use.case)
        for use in uses
    }


_FORMATS = (("fp8", "fp8"), ("fp8", "fp4"), ("bfloat16", "bfloat16"))


@pytest.mark.parametrize("name", ATTENTION)
def test_every_case_at_which_an_op_is_described_is_used(name: str) -> None:
    """Uses are told from the config, cases of an op by its author: the two agree."""
    used = {(use.op, use.case) for use in uses_of(name, 1, "attention")}
    if name == "deepseek-v4-flash":
        used |= _of_two_shards(read_arch(name))
    listed = {(op.name, case) for op in OPS.values() for case in op.cases.get(name, ())}
    described = {(op, case) for op, case in listed if Use(op, case).part == "attention"}
    assert described <= used


@pytest.mark.parametrize("name", ATTENTION)
def test_heads_are_divided_and_no_kernel_is_without_cases(name: str) -> None:
    whole, part = uses_of(name, 1, "attention"), uses_of(name, 8, "attention")
    assert {use.op for use in part} == {use.op for use in whole}
    decode = [use.case.heads for use in part if use.op == "attention.sparse_decode"]
    assert set(decode) == {16 if name == "deepseek-v3.2" else 8}
    with pytest.raises(UserError, match=r"over 5 ranks: attention heads: \d+"):
        uses_of(name, 5)


def test_a_use_counts_passes_and_knows_its_phases() -> None:
    uses = {(use.op, use.case): use for use in uses_of("glm-5.3", 8)}
    times = {op: use.times for (op, _), use in uses.items()}
    assert (times["attention.index_topk"], times["attention.sparse_prefill"]) == (21, 78)
    phases = {op: use.phases for (op, _), use in uses.items()}
    assert phases["attention.merge"] == (DECODE,)
    assert phases["cache.write"] == (PREFILL, DECODE)


def test_rows_are_rounded_where_a_gpu_meets_quantised_matrices(tmp_path: Path) -> None:
    assert usual_activations("deepseek-v4-flash", "cuda") == "fp8"
    assert usual_activations("deepseek-v4-flash", "cpu") == "plain"
    assert usual_activations("glm-5.3", "cuda") == "plain"  # its attention alone is here
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert usual_activations(tmp_path, "cuda") == "plain"


def test_served_uses_come_first_and_parts_are_known() -> None:
    uses = uses_of("pebble", 1)
    assert [use.served for use in uses] == sorted((use.served for use in uses), reverse=True)
    assert {use.part for use in uses} == set(PARTS)
    assert {use.part for use in uses_of("pebble", 1, "experts")} == {"experts"}
    with pytest.raises(UserError, match="'layers' is no part of a model"):
        uses_of("pebble", 1, "layers")
