"""Ledger: how many bytes an engine needs, from the Arch alone: weights, state, blocks, activations.

Weights, state and blocks are exact sums over what is allocated. Activations are a bound on what a
step of the largest shape holds at once; the dry run at start-up (`llm.engine`) puts it to the test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from metainfer.arch.cache_kinds import CacheKind, Scope, cache_kinds
from metainfer.arch.manifest import MTP_PREFIX, TensorSpec, iterate
from metainfer.arch.record import Arch, LayerKind
from metainfer.core.dtypes import DType
from metainfer.ops.base import ELEMENT_BYTES
from metainfer.ops.cache_formats import CacheFormats
from metainfer.plan.settings import Residency

KERNEL_WORKSPACE_BYTES = 256 * 2**20
"""What kernels may take for tiles and gathered rows, whatever the step; they bound themselves."""

GPU_WORKSPACE_BYTES = 2 * 2**30
"""The same on a GPU: entries that are decoded for prefill (1.25 GiB at most), scores of the indexer
(256 MiB) and keys that it lays in order (128 MiB), lists and partial results."""

PROMPT_LOGITS_BYTES = 64 * 2**20
"""Logits of prompt rows are made in slices of at most so many bytes (but at least one row)."""

# Dense weights that take part in fp32 products, whatever the compute dtype is.
_FP32_PARTS = (".compressor.", ".ffn.gate.", ".weights_proj.")
_QUANTISED = (DType.F8_E4M3, DType.I8)


def weights_bytes(arch: Arch, residency: str, compute_dtype: str) -> int:
    """Memory of the weights of one rank; drafting blocks are not loaded."""
    return sum(
        _resident_bytes(spec, residency, ELEMENT_BYTES[compute_dtype])
        for spec in iterate(arch)
        if not spec.name.startswith(MTP_PREFIX)
    )


def _resident_bytes(spec: TensorSpec, residency: str, compute_bytes: int) -> int:
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


def state_bytes(arch: Arch, num_slots: int, caches: CacheFormats, draft_rows: int) -> int:
    """Memory of the rings of `num_slots` sequences."""
    kinds = cache_kinds(arch, draft_rows)
    return num_slots * _bytes_per_block(kinds, Scope.SEQUENCE, caches)


def block_bytes(arch: Arch, caches: CacheFormats) -> int:
    """Memory of one block in all growing kinds; 0 for a model that compresses nothing."""
    return _bytes_per_block(cache_kinds(arch), Scope.TOKENS, caches)


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
) -> int:
    """Bound on what one step holds beside weights and cache.

    Args:
        rows: rows of a step at most.
        num_seqs: sequences of a step at most; each has a row with logits.
        max_model_len: of the longest sequence.
        workspace_bytes: what the kernels of the device may take.
    """
    size = ELEMENT_BYTES[compute_dtype]
    # The residual streams: old, new, and a copy in fp32 while they are mixed.
    streams = rows * arch.hc_mult * arch.hidden_size * (2 * size + 4)
    inner = max(
        _attention_bytes(arch, rows, size),
        _experts_bytes(arch, rows, size),
        _logits_bytes(arch, min(rows, num_seqs)),
    )
    decode = _decode_bytes(arch, min(rows, num_seqs), max_model_len)
    return streams + inner + decode + workspace_bytes


def _attention_bytes(arch: Arch, rows: int, size: int) -> int:
    """Queries and outputs of the heads, latents, index queries, compressor rows, chosen entries."""
    heads = arch.num_heads * arch.head_dim
    narrow = arch.q_lora_rank + arch.head_dim + arch.o_groups * arch.o_lora_rank + arch.hidden_size
    elements = 2 * heads + 2 * narrow
    fp32 = 0
    if any(layer.kind is not LayerKind.SLIDING for layer in arch.layers):
        fp32 += 4 * arch.head_dim
    if any(layer.kind is LayerKind.COMPRESSED_SPARSE for layer in arch.layers):
        elements += 2 * arch.index_num_heads * arch.index_head_dim
        fp32 += 4 * arch.index_head_dim + arch.index_num_heads + 2 * arch.index_topk
    return rows * (elements * size + fp32 * 4)


def _experts_bytes(arch: Arch, rows: int, size: int) -> int:
    """Rows sorted by expert, their gate and up, and what comes out, in fp32 where it is summed."""
    per_choice = arch.hidden_size * (size + 4) + 3 * arch.moe_intermediate_size * size
    shared = 3 * arch.moe_intermediate_size * arch.num_shared_experts * size
    per_row = shared + 2 * arch.hidden_size * 4
    return rows * (arch.experts_per_token * per_choice + per_row)


def _logits_bytes(arch: Arch, rows: int) -> int:
    """Logits of sampled rows with what sampling makes of them (a changed copy, scaled ones, weights
    of 8 bytes), or a slice of prompt rows with its log-probabilities."""
    sampled = 5 * rows * arch.vocab_size * 4
    return max(sampled, 2 * max(PROMPT_LOGITS_BYTES, arch.vocab_size * 4))


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
