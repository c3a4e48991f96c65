"""The call of an op at one load: real shapes for coverage, verification and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from metainfer.kernels.inputs import (
    attention,
    cache,
    compress,
    hc,
    index,
    linear,
    moe,
    norm,
    quantise,
    rope,
    sample,
    step,
)
from metainfer.kernels.inputs.base import Call, Draw
from metainfer.ops.base import Load

Loaded = Callable[[Any, Draw, Load], Call]


def _by_rows(make: Callable[..., Call]) -> Loaded:
    """For ops whose inputs have as many rows as the load, and no other size."""
    return lambda case, draw, load: make(case, draw, load.rows)


LOADED: Mapping[str, Loaded] = MappingProxyType(
    {
        "norm.rms_norm": _by_rows(norm.rms_norm),
        "rope.rotate": _by_rows(rope.rotate),
        "rope.norm_rotate": _by_rows(rope.norm_rotate),
        "norm.layer_norm_rotate": _by_rows(rope.layer_norm_rotate),
        "norm.add_rms_norm": _by_rows(norm.add_rms_norm),
        "norm.rms_norm_fp8": _by_rows(norm.rms_norm_fp8),
        "quantise.fp8": _by_rows(quantise.fp8),
        "cache.write": cache.write_at_load,
        "cache.read": cache.read_at_load,
        "cache.write_index": cache.write_index_at_load,
        "index.encode_queries": _by_rows(cache.encode_queries),
        "linear.dense": _by_rows(linear.dense),
        "linear.fp8_block": _by_rows(linear.fp8_block),
        "linear.grouped": _by_rows(linear.grouped),
        "linear.fp8_rows": _by_rows(linear.fp8_rows),
        "linear.grouped_fp8_rows": _by_rows(linear.grouped_fp8_rows),
        "hc.mix": _by_rows(hc.mix),
        "hc.mix_norm": _by_rows(hc.mix_norm),
        "hc.mix_shifted": _by_rows(hc.mix_shifted),
        "hc.expand": _by_rows(hc.expand),
        "hc.collapse": _by_rows(hc.collapse),
        "hc.head": _by_rows(hc.head),
        "hc.expand_mix_fp8": _by_rows(hc.expand_mix_fp8),
        "attention.index_topk": index.index_topk_at_load,
        "attention.index_topk_decode": index.index_topk_decode_at_load,
        "attention.sparse_prefill": attention.sparse_prefill_at_load,
        "attention.sparse_decode": attention.sparse_decode_at_load,
        "attention.merge": attention.merge_at_load,
        "attention.compress": compress.compress_at_load,
        "attention.compress_decode": compress.compress_decode_at_load,
        "attention.compress_step": compress.compress_step_at_load,
        "moe.route_hash": _by_rows(moe.route_hash),
        "moe.route_learned": _by_rows(moe.route_learned),
        "moe.experts": _by_rows(moe.experts),
        "moe.experts_fp8_rows": _by_rows(moe.experts_fp8_rows),
        "moe.swiglu": _by_rows(moe.swiglu),
        "moe.swiglu_fp8": _by_rows(moe.swiglu),
        "sample.adjust": sample.adjust_at_load,
        "sample.draw": _by_rows(sample.draw_tokens),
        "sample.logprobs": sample.logprobs_at_load,
        "step.index_decode": step.index_decode_at_load,
    }
)
"""By op: (case, draw, load) -> call."""


def at_load(op: str, case: Any, load: Load, draw: Draw) -> Call:
    """Inputs of `op` for the sizes of `load`, with nothing odd about them."""
    return LOADED[op](case, draw, load)
