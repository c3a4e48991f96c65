"""Ledger: how many bytes an engine needs, from the Arch alone: weights, state, blocks, activations.

Weights, state and blocks are exact sums over what is allocated. Activations are a bound on what a
step of the largest shape holds at once; the dry run at start-up (`llm.engine`) puts it to the test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from metainfer.arch.cache_kinds import BLOCK_TOKENS, CacheKind, Scope, blocks_for, cache_kinds
from metainfer.arch.manifest import MTP_PREFIX, TensorSpec, iterate
from metainfer.arch.record import Arch, LayerKind
from metainfer.arch.shape_of import shape_of_v4
from metainfer.arch.split import expert_of, own_experts, rank_shape
from metainfer.arch.stages import Stage
from metainfer.core.dtypes import DType
from metainfer.ops.base import ELEMENT_BYTES
from metainfer.ops.cache_formats import CacheFormats
from metainfer.plan.settings import Residency
from metainfer.plan.step_bytes import (
    attention_bytes,
    exchange_bytes,
    experts_bytes,
    logits_bytes,
    step_widths,
    stream_bytes,
)

KERNEL_WORKSPACE_BYTES = 256 * 2**20
"""What kernels may take for tiles and gathered rows, whatever the step; they bound themselves."""

INDEX_SCRATCH_BYTES = (256 + 128) * 2**20
"""What the indexer takes on a GPU at most: scores, and keys that it lays in order."""

GPU_WORKSPACE_BYTES = 2 * 2**30
"""What kernels may take on a GPU: entries that are decoded for prefill (1.25 GiB at most),
`INDEX_SCRATCH_BYTES`, lists and partial results."""

_EXCHANGED = 6  # copies of queries or results of a step that shards exchange, at a time

# Dense weights that take part in fp32 products, whatever the compute dtype is.
_FP32_PARTS = (".compressor.", ".ffn.gate.", ".mlp.gate.", ".weights_proj.")
_QUANTISED = (DType.F8_E4M3, DType.I8)

# Columns, and rows of two matrices that are stacked.
_IN_PIECES = re.compile(r"\.(attn\.wo_b|shared_experts\.w[123])\.")


def weights_bytes(
    arch: Arch,
    residency: str,
    compute_dtype: str,
    ranks: int = 1,
    context: int = 1,
    expert: int = 1,
    stage: Stage | None = None,
) -> int:
    """Memory of the weights of one of `ranks` ranks; drafting blocks are not loaded.

    Args:
        context: ranks that share the tokens of long prefills. They have the same heads; of what
            does not lie together in those, decoding has its part a second time.
        expert: parts of the ranks over which experts are dealt.
        stage: whose ranks these are; None where one stage has all layers.
    """
    own = own_experts(arch.num_experts, 0, ranks, expert)

    def resident(spec: TensorSpec, context: int) -> int:
        part = replace(spec, shape=rank_shape(spec.name, spec.shape, ranks, context, expert))
        return resident_bytes(part, residency, ELEMENT_BYTES[compute_dtype])

    total = 0
    for spec in iterate(arch):
        if spec.name.startswith(MTP_PREFIX) or not (stage is None or stage.has(spec.name)):
            continue
        if (number := expert_of(spec.name)) is not None and number not in own:
            continue
        total += resident(spec, context)
        if context > 1 and _IN_PIECES.search(spec.name):
            total += resident(spec, 1)
    return total


def resident_bytes(spec: TensorSpec, residency: str, compute_bytes: int) -> int:
    """Memory of one stored tensor once it is loaded."""
    elements = math.prod(spec.shape)
    if spec.dtype in _QUANTISED or spec.name.endswith(".scale"):
        if residency == Residency.QUANTISED:
            return spec.nbytes
        if spec.name.endswith(".scale"):
            return 0
        return elements * compute_bytes * (2 if spec.dtype is DType.I8 else 1)
    if spec.dtype not in (DType.F32, DType.BF16) or spec.name == "embed.weight":
        return spec.nbytes
    if any(part in spec.name for part in _FP32_PARTS):
        return elements * 4
    return max(spec.nbytes, elements * compute_bytes)


def state_bytes(
    arch: Arch,
    num_slots: int,
    caches: CacheFormats,
    draft_rows: int,
    layers: range | None = None,
) -> int:
    """Memory of the rings of `num_slots` sequences, of all layers or some."""
    kinds = cache_kinds(arch, draft_rows, layers)
    return num_slots * _bytes_per_block(kinds, Scope.SEQUENCE, caches)


def block_bytes(arch: Arch, caches: CacheFormats, layers: range | None = None) -> int:
    """Memory of one block in all growing kinds, of all layers or some; 0 where these compress
    nothing."""
    return _bytes_per_block(cache_kinds(arch, layers=layers), Scope.TOKENS, caches)


def _bytes_per_block(kinds: Iterable[CacheKind], scope: Scope, caches: CacheFormats) -> int:
    return sum(
        kind.rows_per_block * caches.row_bytes(kind) for kind in kinds if kind.scope is scope
    )


def activation_bytes(
    arch: Arch,
    rows: int,
    num_seqs: int,
    max_model_len: int,
    compute_dtype: str,
    workspace_bytes: int = KERNEL_WORKSPACE_BYTES,
    ranks: int = 1,
    expert: int = 1,
) -> int:
    """Bound on what one step holds beside weights and cache.

    Args:
        rows: rows of a step at most.
        num_seqs: sequences of a step at most; each has a row with logits.
        max_model_len: of the longest sequence.
        workspace_bytes: what the kernels of the device may take.
        ranks: that divide heads, experts and head; the step is that of one of them.
        expert: parts of these over which experts are dealt: all rows may go to one of them.
    """
    size = ELEMENT_BYTES[compute_dtype]
    widths = step_widths(shape_of_v4(arch), tensor=ranks, expert_slices=ranks // expert)
    streams = stream_bytes(widths, rows, size)
    sums = gathered = 0
    if ranks > 1:
        sums, gathered = exchange_bytes(widths, rows, size, min(rows, num_seqs))
    inner = max(
        attention_bytes(widths, rows, size) + sums,
        experts_bytes(widths, rows, size) + sums,
        logits_bytes(arch.vocab_size, min(rows, num_seqs)) + gathered,
    )
    decode = _decode_bytes(arch, min(rows, num_seqs), max_model_len)
    return streams + inner + decode + workspace_bytes


def exchange_of_shards(
    arch: Arch,
    rows: int,
    max_model_len: int,
    compute_dtype: str,
    caches: CacheFormats,
    ranks: int,
    kv_shards: int,
) -> int:
    """Bound on what a step holds to read caches that are divided over `kv_shards` of the ranks:
    the entries, or index keys, of one layer of the longest sequence with what the rank gives to
    them; and for so many decode rows queries and results of the heads of all shards."""
    if kv_shards == 1:
        return 0
    blocks = blocks_for(max_model_len, kv_shards * BLOCK_TOKENS)
    kinds = (kind for kind in cache_kinds(arch) if kind.scope is Scope.TOKENS)
    given = max((kind.rows_per_block * caches.row_bytes(kind) for kind in kinds), default=0)
    heads = arch.num_heads // ranks * kv_shards
    # Queries as they come and in their places, results, as sent, as received and to be merged.
    width = arch.head_dim * ELEMENT_BYTES[compute_dtype] + 4
    return (kv_shards + 1) * blocks * given + _EXCHANGED * rows * heads * width


def _decode_bytes(arch: Arch, rows: int, max_model_len: int) -> int:
    """Latents and entries gathered for rows of decoding sequences, and the scores of all entries
    that the indexer sees."""
    most = 0
    for layer in arch.layers:
        entries = max_model_len // layer.ratio if layer.ratio else 0
        if layer.kind is LayerKind.COMPRESSED_SPARSE:
            seen = min(entries, arch.index_topk)
            index = entries * (arch.index_head_dim + arch.index_num_heads + 4)
        else:
            seen, index = entries, 0
        keys = arch.sliding_window + seen
        most = max(most, keys * (2 * arch.head_dim + 2 * arch.num_heads) + index)
    return rows * most * 4
