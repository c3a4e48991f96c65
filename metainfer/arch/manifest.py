"""Manifest: every tensor of a checkpoint in the released layout, from the Arch alone.

Names, formats and shapes are those of the released DeepSeek-V4-Flash files: for V4-Flash the list
has 69,187 tensors of 159,609,485,896 bytes, the `total_size` of the release.
"""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.arch.record import Arch, LayerKind, RouterKind, WeightFormat
from metainfer.arch.tensors import TensorSpec, matrix
from metainfer.core.dtypes import DType

__all__ = ["MTP_PREFIX", "TensorSpec", "iterate", "manifest", "plain_dtype", "total_bytes"]

MTP_PREFIX = "mtp."  # drafting blocks: recognised in files, not used


def manifest(arch: Arch) -> dict[str, TensorSpec]:
    """All tensors of `arch`'s checkpoint by name, in the order of the model."""
    return {spec.name: spec for spec in iterate(arch)}


def total_bytes(arch: Arch) -> int:
    """Bytes of all tensors, without file headers."""
    return sum(spec.nbytes for spec in iterate(arch))


def iterate(arch: Arch, every_expert: bool = True) -> Iterator[TensorSpec]:
    """The tensors one by one. Those of a DSpark drafter (mtp.*) are not described.

    Args:
        every_expert: otherwise the first routed expert of a layer stands for all.
    """
    routed = arch.num_experts if every_expert else 1
    plain = plain_dtype(arch)
    width, streams = arch.hidden_size, arch.hc_mult
    yield TensorSpec("embed.weight", plain, (arch.vocab_size, width))
    for layer in arch.layers:
        prefix = f"layers.{layer.index}."
        yield from _block(arch, prefix, layer.kind, layer.ratio, layer.router, routed)
    yield TensorSpec("norm.weight", plain, (width,))
    yield TensorSpec("head.weight", plain, (arch.vocab_size, width))
    yield from _hyper_connection(streams, streams * width, "hc_head", 1)
    for index in range(arch.num_mtp_layers):
        yield from _mtp_block(arch, f"{MTP_PREFIX}{index}.", routed)


def plain_dtype(arch: Arch) -> DType:
    """Format of what is never quantised: embedding, norms, router, compressors."""
    return DType.F32 if arch.quantisation.linear is WeightFormat.F32 else DType.BF16


def _block(
    arch: Arch, prefix: str, kind: LayerKind, ratio: int, router: RouterKind, routed: int
) -> Iterator[TensorSpec]:
    plain = plain_dtype(arch)
    width, streams = arch.hidden_size, arch.hc_mult
    for part in ("attn", "ffn"):
        mixes = (2 + streams) * streams  # pre, post and the streams x streams mixing matrix
        yield from _hyper_connection(mixes, streams * width, f"{prefix}hc_{part}", 3)
        yield TensorSpec(f"{prefix}{part}_norm.weight", plain, (width,))
    yield from _attention(arch, f"{prefix}attn.")
    if kind is not LayerKind.SLIDING:
        overlap = 2 if kind is LayerKind.COMPRESSED_SPARSE else 1
        yield from _compressor(
            arch, f"{prefix}attn.compressor.", ratio, overlap * arch.head_dim, arch.head_dim
        )
    if kind is LayerKind.COMPRESSED_SPARSE:
        yield from _indexer(arch, f"{prefix}attn.indexer.", ratio)
    yield from _experts(arch, f"{prefix}ffn.", router, routed)


def _hyper_connection(rows: int, columns: int, name: str, scales: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}_fn", DType.F32, (rows, columns))
    yield TensorSpec(f"{name}_base", DType.F32, (rows,))
    yield TensorSpec(f"{name}_scale", DType.F32, (scales,))


def _attention(arch: Arch, prefix: str) -> Iterator[TensorSpec]:
    plain, linear = plain_dtype(arch), arch.quantisation.linear
    heads_width = arch.num_heads * arch.head_dim
    yield from _matrix(arch, f"{prefix}wq_a", linear, arch.q_lora_rank, arch.hidden_size)
    yield TensorSpec(f"{prefix}q_norm.weight", plain, (arch.q_lora_rank,))
    yield from _matrix(arch, f"{prefix}wq_b", linear, heads_width, arch.q_lora_rank)
    yield from _matrix(arch, f"{prefix}wkv", linear, arch.head_dim, arch.hidden_size)
    yield TensorSpec(f"{prefix}kv_norm.weight", plain, (arch.head_dim,))
    # wo_a holds o_groups matrices [o_lora_rank, heads_width / o_groups], one below the other.
    grouped = arch.o_groups * arch.o_lora_rank
    yield from _matrix(arch, f"{prefix}wo_a", linear, grouped, heads_width // arch.o_groups)
    yield from _matrix(arch, f"{prefix}wo_b", linear, arch.hidden_size, grouped)
    yield TensorSpec(f"{prefix}attn_sink", DType.F32, (arch.num_heads,))


def _compressor(
    arch: Arch, prefix: str, ratio: int, width: int, entry_width: int
) -> Iterator[TensorSpec]:
    plain = plain_dtype(arch)
    yield TensorSpec(f"{prefix}wkv.weight", plain, (width, arch.hidden_size))
    yield TensorSpec(f"{prefix}wgate.weight", plain, (width, arch.hidden_size))
    yield TensorSpec(f"{prefix}ape", DType.F32, (ratio, width))
    yield TensorSpec(f"{prefix}norm.weight", plain, (entry_width,))


def _indexer(arch: Arch, prefix: str, ratio: int) -> Iterator[TensorSpec]:
    rows = arch.index_num_heads * arch.index_head_dim
    yield from _matrix(arch, f"{prefix}wq_b", arch.quantisation.linear, rows, arch.q_lora_rank)
    shape = (arch.index_num_heads, arch.hidden_size)
    yield TensorSpec(f"{prefix}weights_proj.weight", plain_dtype(arch), shape)
    width = arch.index_head_dim
    yield from _compressor(arch, f"{prefix}compressor.", ratio, 2 * width, width)


def _experts(arch: Arch, prefix: str, router: RouterKind, routed: int) -> Iterator[TensorSpec]:
    width, inner = arch.hidden_size, arch.moe_intermediate_size
    shape = (arch.num_experts, width)
    yield TensorSpec(f"{prefix}gate.weight", plain_dtype(arch), shape)
    if router is RouterKind.HASH:
        table = (arch.vocab_size, arch.experts_per_token)
        yield TensorSpec(f"{prefix}gate.tid2eid", DType.I64, table)
    else:
        yield TensorSpec(f"{prefix}gate.bias", DType.F32, (arch.num_experts,))
    groups = [(f"{prefix}experts.{n}.", arch.quantisation.experts) for n in range(routed)]
    groups.append((f"{prefix}shared_experts.", arch.quantisation.linear))
    for expert, weight_format in groups:
        yield from _matrix(arch, f"{expert}w1", weight_format, inner, width)
        yield from _matrix(arch, f"{expert}w2", weight_format, width, inner)
        yield from _matrix(arch, f"{expert}w3", weight_format, inner, width)


def _mtp_block(arch: Arch, prefix: str, routed: int) -> Iterator[TensorSpec]:
    plain, width = plain_dtype(arch), arch.hidden_size
    yield from _block(arch, prefix, LayerKind.SLIDING, 0, RouterKind.LEARNED, routed)
    for name in ("e_proj", "h_proj"):
        yield from _matrix(arch, f"{prefix}{name}", arch.quantisation.linear, width, width)
    for name in ("enorm", "hnorm", "norm"):
        yield TensorSpec(f"{prefix}{name}.weight", plain, (width,))
    yield from _hyper_connection(arch.hc_mult, arch.hc_mult * width, f"{prefix}hc_head", 1)


def _matrix(
    arch: Arch, prefix: str, weight_format: WeightFormat, rows: int, columns: int
) -> Iterator[TensorSpec]:
    """A linear layer's weight [rows, columns] in its stored format."""
    return matrix(arch.quantisation, prefix, weight_format, rows, columns)
