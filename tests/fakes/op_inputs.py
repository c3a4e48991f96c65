"""Variants of inputs for every op at any of its cases: what generic tests of backends run.

Row counts, rows that lie apart, empty lists, garbage where nobody may look, ties. `make` is
deterministic: the same name gives the same numbers, in memory of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
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

Maker = Callable[[Any, Draw], Call]


def _rows(maker: Callable[..., Call], *counts: int, **fixed: Any) -> dict[str, Maker]:
    return {f"{count} rows": partial(maker, rows=count, **fixed) for count in counts}


VARIANTS: Mapping[str, Mapping[str, Maker]] = {
    "norm.rms_norm": {
        **_rows(norm.rms_norm, 0, 1, 7),
        "rows apart": partial(norm.rms_norm, rows=5, spread=True),
        "fp32 in": partial(norm.rms_norm, rows=5, dtype="float32", spread=True),
        "bf16 in": partial(norm.rms_norm, rows=5, dtype="bfloat16"),
    },
    "rope.rotate": {
        **_rows(rope.rotate, 0, 1, 7),
        "rows apart": partial(rope.rotate, rows=5, spread=True),
    },
    "rope.norm_rotate": {
        **_rows(rope.norm_rotate, 0, 1, 7),
        "rows apart": partial(rope.norm_rotate, rows=5, spread=True),
    },
    "norm.layer_norm_rotate": {
        **_rows(rope.layer_norm_rotate, 0, 1, 7),
        "rows apart": partial(rope.layer_norm_rotate, rows=5, spread=True),
    },
    "norm.add_rms_norm": {
        **_rows(norm.add_rms_norm, 0, 1, 7),
        "rows apart": partial(norm.add_rms_norm, rows=5, spread=True),
    },
    "norm.rms_norm_fp8": {
        **_rows(norm.rms_norm_fp8, 0, 1, 7),
        "rows apart": partial(norm.rms_norm_fp8, rows=5, spread=True),
    },
    "quantise.fp8": {
        **_rows(quantise.fp8, 0, 1, 7),
        "rows apart": partial(quantise.fp8, rows=5, spread=True),
        "wide": partial(quantise.fp8, rows=9, kind="wide"),
    },
    "cache.write": {
        **_rows(cache.write, 0, 1, 7),
        "rows apart": partial(cache.write, rows=5, spread=True),
        "wide": partial(cache.write, rows=9, kind="wide"),
        "fp32 cache": partial(cache.write, rows=5, dtype="float32"),
        "bf16 cache": partial(cache.write, rows=5, dtype="bfloat16"),
    },
    "cache.read": {
        **_rows(cache.read, 0, 1, 7),
        "rows apart": partial(cache.read, rows=5, spread=True),
    },
    "cache.write_index": {
        **_rows(cache.write_index, 0, 1, 7),
        "rows apart": partial(cache.write_index, rows=5, spread=True),
        "wide": partial(cache.write_index, rows=9, kind="wide"),
    },
    "index.encode_queries": {
        **_rows(cache.encode_queries, 0, 1, 7),
        "rows apart": partial(cache.encode_queries, rows=5, spread=True),
        "wide": partial(cache.encode_queries, rows=9, kind="wide"),
    },
    "linear.dense": {
        **_rows(linear.dense, 0, 1, 2, 33, 150),
        "rows apart": partial(linear.dense, rows=5, spread=True),
        "one row apart": partial(linear.dense, rows=1, spread=True),
        "fp32 weight": partial(linear.dense, rows=5, dtype="float32"),
        "bf16 weight": partial(linear.dense, rows=5, dtype="bfloat16"),
    },
    "linear.fp8_block": {
        **_rows(linear.fp8_block, 0, 1, 2, 33, 150),
        "rows apart": partial(linear.fp8_block, rows=5, spread=True),
        "fp32 scales, one row": partial(linear.fp8_block, rows=1, scales="fp32"),
        "fp32 scales": partial(linear.fp8_block, rows=19, scales="fp32"),
    },
    "linear.grouped": {
        **_rows(linear.grouped, 0, 1, 2, 33, 150),
        "fp32 scales": partial(linear.grouped, rows=3, scales="fp32"),
        "fp32 weight": partial(linear.grouped, rows=3, dtype="float32"),
        "bf16 weight": partial(linear.grouped, rows=3, dtype="bfloat16"),
    },
    "linear.fp8_rows": {
        **_rows(linear.fp8_rows, 0, 1, 33, 150),
        "rows apart": partial(linear.fp8_rows, rows=5, spread=True),
        "many rows apart": partial(linear.fp8_rows, rows=131, spread=True),
        "fp32 scales": partial(linear.fp8_rows, rows=19, scales="fp32"),
        "fp32 scales, many rows": partial(linear.fp8_rows, rows=140, scales="fp32"),
    },
    "linear.grouped_fp8_rows": {
        **_rows(linear.grouped_fp8_rows, 0, 1, 33, 150),
        "rows apart": partial(linear.grouped_fp8_rows, rows=5, spread=True),
        "many rows apart": partial(linear.grouped_fp8_rows, rows=131, spread=True),
        "fp32 scales": partial(linear.grouped_fp8_rows, rows=3, scales="fp32"),
    },
    "hc.mix": {
        **_rows(hc.mix, 0, 1, 3, 33, 300),
        "sharp": partial(hc.mix, rows=5, sharpness=20.0),
        "one sharp row": partial(hc.mix, rows=1, sharpness=20.0),
    },
    "hc.mix_norm": {
        **_rows(hc.mix_norm, 0, 1, 33),
        "sharp": partial(hc.mix_norm, rows=5, sharpness=20.0),
    },
    "hc.mix_shifted": {
        **_rows(hc.mix_shifted, 0, 1, 3, 33),
        "first sublayer": partial(hc.mix_shifted, rows=5, first=True),
    },
    "hc.expand": {
        **_rows(hc.expand, 0, 1, 7, 300),
        "fp32 y": partial(hc.expand, rows=5, dtype="float32"),
        "bf16 y": partial(hc.expand, rows=5, dtype="bfloat16"),
        "bf16 more": partial(hc.expand, rows=3, dtype="float32", more="bfloat16"),
        "fp32 more": partial(hc.expand, rows=3, more="float32"),
    },
    "hc.collapse": _rows(hc.collapse, 0, 1, 7),
    "hc.head": _rows(hc.head, 0, 1, 7),
    "hc.expand_mix_fp8": {
        **_rows(hc.expand_mix_fp8, 0, 1, 7, 33, 70),
        "first sublayer": partial(hc.expand_mix_fp8, rows=3, first=True),
        "sharp": partial(hc.expand_mix_fp8, rows=5, sharpness=20.0),
        "two summands, rows apart": partial(
            hc.expand_mix_fp8, rows=3, dtype="float32", more="bfloat16", spread=True
        ),
        "bf16 y, fp32 more": partial(hc.expand_mix_fp8, rows=2, dtype="bfloat16", more="float32"),
    },
    "attention.compress": {
        "first window": partial(compress.compress, entries=1, first=0),
        "from the start": partial(compress.compress, entries=5, first=0),
        "one later": partial(compress.compress, entries=1, first=3),
        "later": partial(compress.compress, entries=11, first=2),
        "sharp": partial(compress.compress, entries=3, first=0, sharpness=100.0),
    },
    "attention.compress_decode": {
        **{
            f"{count} entries": partial(compress.compress_decode, entries=count)
            for count in (0, 1, 5)
        },
        "windows that stay open": partial(compress.compress_decode, entries=5, closing=False),
    },
    "attention.compress_step": {
        **_rows(compress.compress_step, 0, 1, 5),
        "nothing closes": partial(compress.compress_step, rows=3, closing=False),
        "drafts": partial(compress.compress_step, rows=12, together=4),
        "drafts, rows apart": partial(compress.compress_step, rows=6, together=3, spread=True),
        "bf16 cache": partial(compress.compress_step, rows=2, cache="bfloat16"),
        "no cache": partial(compress.compress_step, rows=2, cache=""),
    },
    "attention.index_topk": {
        **_rows(index.index_topk, 0, 1, 65, start=0),
        "start": partial(index.index_topk, rows=5, start=71),
        "one late row": partial(index.index_topk, rows=1, start=150),
        "fewer entries": partial(index.index_topk, rows=3, start=40, entries=7),
        "no entries": partial(index.index_topk, rows=3, start=30, entries=0),
        "ties": partial(index.index_topk, rows=4, start=111, kind="ties"),
        "NaN": partial(index.index_topk, rows=4, start=61, kind="nan"),
        "fp32 keys": partial(index.index_topk, rows=3, start=71, dtype="float32"),
        "bf16 keys": partial(index.index_topk, rows=3, start=71, dtype="bfloat16"),
        "ragged": partial(index.index_topk_ragged, parts=((0, 5), (70, 1), (33, 3), (0, 1))),
        "any order": partial(
            index.index_topk_ragged, parts=((90, 3), (5, 2)), shuffled=True, kind="ties"
        ),
    },
    "attention.index_topk_decode": {
        **_rows(index.index_topk_decode, 0, 1, 8, entries=29),
        "few entries": partial(index.index_topk_decode, rows=4, entries=3),
        "padded": partial(index.index_topk_decode, rows=4, entries=23, padding=150),
        "no entries": partial(index.index_topk_decode, rows=2, entries=0),
        "ties": partial(index.index_topk_decode, rows=4, entries=41, kind="ties"),
        "NaN": partial(index.index_topk_decode, rows=4, entries=17, kind="nan"),
        "fp32 keys": partial(index.index_topk_decode, rows=2, entries=29, dtype="float32"),
        "bf16 keys": partial(index.index_topk_decode, rows=2, entries=29, dtype="bfloat16"),
    },
    "attention.sparse_prefill": {
        **_rows(attention.sparse_prefill, 0, 1, 5, 67, start=0),
        "start": partial(attention.sparse_prefill, rows=9, start=45),
        "one late row": partial(attention.sparse_prefill, rows=1, start=99),
        "short halo": partial(attention.sparse_prefill, rows=6, start=3),
        "many entries": partial(attention.sparse_prefill, rows=70, start=400),
        "late, all entries": partial(attention.sparse_prefill, rows=2, start=400, select=False),
        "long halo": partial(attention.sparse_prefill, rows=2, start=50, halo=60),
        "sharp": partial(attention.sparse_prefill, rows=5, start=20, sharpness=30.0),
        "far below": partial(attention.sparse_prefill_far_below, rows=2, start=50),
        "all entries": partial(attention.sparse_prefill, rows=5, start=45, select=False),
        "fp32 entries": partial(attention.sparse_prefill, rows=2, start=50, dtype="float32"),
        "bf16 entries": partial(attention.sparse_prefill, rows=2, start=50, dtype="bfloat16"),
        "ragged": partial(attention.sparse_prefill, rows=3, start=14, sequences=3),
        "ragged, all entries": partial(
            attention.sparse_prefill, rows=3, start=0, sequences=4, select=False
        ),
        "rows in any order": partial(
            attention.sparse_prefill, rows=4, start=70, sequences=2, shuffled=True
        ),
    },
    "attention.sparse_decode": {
        **_rows(attention.sparse_decode, 0, 1, 4),
        "full lists": partial(attention.sparse_decode, rows=2, full=True),
        "one full row": partial(attention.sparse_decode, rows=1, full=True),
        "no columns": partial(attention.sparse_decode, rows=3, columns=0),
        "many columns": partial(attention.sparse_decode, rows=1, columns=300),
        "sharp": partial(attention.sparse_decode, rows=3, sharpness=30.0),
        "fp32 caches": partial(attention.sparse_decode, rows=2, dtype="float32"),
        "bf16 caches": partial(attention.sparse_decode, rows=2, dtype="bfloat16"),
    },
    "attention.merge": {
        **_rows(attention.merge, 0, 1, 7),
        "one shard": partial(attention.merge, rows=3, shards=1),
        "many shards": partial(attention.merge, rows=3, shards=8, full=True),
        "fp32 shards": partial(attention.merge, rows=5, dtype="float32"),
    },
    "moe.route_hash": {
        **_rows(moe.route_hash, 0, 1, 7),
        "bf16 gate": partial(moe.route_hash, rows=5, dtype="bfloat16"),
        "padding": partial(moe.route_hash, rows=6, padded=True),
    },
    "moe.route_learned": {
        **_rows(moe.route_learned, 0, 1, 7),
        "bf16 gate": partial(moe.route_learned, rows=5, dtype="bfloat16"),
        "padding": partial(moe.route_learned, rows=6, padded=True),
    },
    "moe.experts": {
        **_rows(moe.experts, 0, 1, 2, 5, 67),
        "few experts": partial(moe.experts, rows=9, same=True),
        "an expert twice": partial(moe.experts, rows=5, repeated=True),
        "an expert twice, one row": partial(moe.experts, rows=1, repeated=True),
        "fp32 scales": partial(moe.experts, rows=5, scales="fp32"),
        "empty rows": partial(moe.experts, rows=7, empty=True),
        "many empty rows": partial(moe.experts, rows=67, empty=True),
        "no expert at all": partial(moe.experts, rows=1, empty=True),
    },
    "moe.experts_fp8_rows": {
        **_rows(moe.experts_fp8_rows, 0, 1, 2, 5, 67),
        "few experts": partial(moe.experts_fp8_rows, rows=9, same=True),
        "an expert twice": partial(moe.experts_fp8_rows, rows=5, repeated=True),
        "rows apart": partial(moe.experts_fp8_rows, rows=5, spread=True),
        "empty rows": partial(moe.experts_fp8_rows, rows=7, empty=True),
        "no expert at all": partial(moe.experts_fp8_rows, rows=1, empty=True),
        "distant scales": partial(moe.experts_fp8_rows, rows=5, far=20),
        "fp32 scales": partial(moe.experts_fp8_rows, rows=3, scales="fp32"),
    },
    "moe.swiglu": _rows(moe.swiglu, 0, 1, 7),
    "moe.swiglu_fp8": _rows(moe.swiglu, 0, 1, 7),
    "sample.adjust": {
        **_rows(sample.adjust, 0, 1, 7),
        "no lists": partial(sample.adjust, rows=3, lists=0, recent=0),
        "long lists": partial(sample.adjust, rows=5, lists=300),
        "many recent": partial(sample.adjust, rows=5, recent=7),
        "odd": partial(sample.adjust, rows=4, kind="equal"),
    },
    "sample.draw": {
        **_rows(sample.draw_tokens, 0, 1, 14),
        "greedy": partial(sample.draw_tokens, rows=3, rules="greedy", kind="ties"),
        "plain": partial(sample.draw_tokens, rows=5, rules="plain"),
        "ties": partial(sample.draw_tokens, rows=14, kind="ties"),
        "equal": partial(sample.draw_tokens, rows=7, kind="equal"),
        "odd": partial(sample.draw_tokens, rows=5, kind="odd", rules="plain"),
        "odd, greedy": partial(sample.draw_tokens, rows=5, kind="odd", rules="greedy"),
        "adjusted": partial(sample.draw_tokens, rows=9, adjusted=True),
        "adjusted, greedy": partial(sample.draw_tokens, rows=4, adjusted=True, rules="greedy"),
    },
    "sample.logprobs": {
        **_rows(sample.logprobs, 0, 1, 7),
        "none": partial(sample.logprobs, rows=3, top=0),
        "many": partial(sample.logprobs, rows=3, top=20),
        "ties": partial(sample.logprobs, rows=3, top=20, kind="ties"),
        "equal": partial(sample.logprobs, rows=2, kind="equal"),
    },
    "step.index_decode": {
        **_rows(step.index_decode, 0, 1, 7),
        "padding": partial(step.index_decode, rows=6, padding=3),
        "one block": partial(step.index_decode, rows=20, blocks=1),
        "rings with drafts": partial(step.index_decode, rows=9, drafts=3),
        "beyond the table": partial(step.index_decode, rows=5, table=20),
        "many blocks": partial(step.index_decode, rows=2, blocks=300, table=3000),
    },
}


def make(op: str, case: Any, variant: str, device: str = "cpu") -> Call:
    """The inputs of one variant; the same numbers every time."""
    seed = zlib.crc32(f"{op} {case} {variant}".encode())
    return VARIANTS[op][variant](case, Draw(seed, device))
