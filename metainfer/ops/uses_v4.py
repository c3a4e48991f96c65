"""What the layers of a served model bind (`nn`), told from its Arch alone.

The same kinds of layer in the same order as `models.deepseek_v4` builds them; a test compares this
list with what a model that was built has bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from metainfer.arch.cache_kinds import BLOCK_TOKENS, spans
from metainfer.arch.record import Arch, LayerArch, LayerKind, Quantisation, RouterKind, WeightFormat
from metainfer.arch.split import check_split
from metainfer.core.dtypes import DType
from metainfer.core.errors import MetainferError, UserError
from metainfer.ops.attention import AttentionCase, shard_cases
from metainfer.ops.cache import DENSE, CacheReadCase, CacheWriteCase
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.ops.compress import CompressCase
from metainfer.ops.hc import ExpandMixFp8Case, HyperCase
from metainfer.ops.index import IndexCase, decode_case, shard_case
from metainfer.ops.index_codes import IndexEncodeCase, IndexWriteCase
from metainfer.ops.linear import (
    DenseCase,
    Fp8BlockCase,
    Fp8RowsCase,
    GroupedCase,
    GroupedFp8RowsCase,
)
from metainfer.ops.moe import (
    ExpertsCase,
    ExpertsFp8RowsCase,
    RouteCase,
    SwigluCase,
    SwigluFp8Case,
)
from metainfer.ops.norm import RmsNormCase, RmsNormFp8Case
from metainfer.ops.quantise import QuantiseFp8Case
from metainfer.ops.rope import NormRotateCase, RotateCase
from metainfer.ops.step import StepIndexCase, Windows
from metainfer.ops.use import BOTH, DECODE, PREFILL, Use, Uses

ACTIVATIONS = ("plain", "fp8")
"""How rows go into products with quantised matrices: as they are, or rounded to e4m3 groups."""


def served_uses(
    arch: Arch,
    ranks: int,
    dtype: str = "bfloat16",
    stream_dtype: str = "bfloat16",
    activations: str = "plain",
    caches: CacheFormats = FP32_CACHES,
    expert: int = 1,
    kv_shards: int = 1,
    context: int = 1,
) -> tuple[Use, ...]:
    """Uses of one of `ranks` ranks.

    Args:
        expert: parts of the ranks over which experts are dealt.
        kv_shards: of the ranks, over which entries and index keys are divided.
        context: of the ranks, which share the tokens of long prefills: each has all heads of these
            ranks then.
        dtype, stream_dtype, activations, caches: as of `nn.builder.LayerBuilder`.

    Raises:
        UserError: `ranks` does not divide the model (`arch.split.check_split`), or is not divided.
    """
    check_split(arch, ranks, expert)
    for flag, parts in (("prefill", context), ("decode", kv_shards)):
        if ranks % parts:
            raise UserError(
                f"--{flag}-context-parallel-size {parts} does not divide {ranks} ranks",
                hint=f"give a divisor of {ranks}, or leave it out",
            )
    if activations not in ACTIVATIONS:
        raise MetainferError(f"activations are {' or '.join(ACTIVATIONS)}, not {activations}")
    listing = _Listing(
        arch, ranks, dtype, stream_dtype, activations, caches, expert, kv_shards, context
    )
    for layer in arch.layers:
        listing.layer(layer)
    listing.head()
    listing.index()
    return listing.uses.all()


def is_quantised(arch: Arch) -> bool:
    """Whether any matrix of the checkpoint is."""
    stored = arch.quantisation
    return not {stored.linear, stored.experts} <= {WeightFormat.F32, WeightFormat.BF16}


class _Listing:
    """The uses so far, and the shapes of one rank."""

    def __init__(
        self,
        arch: Arch,
        ranks: int,
        dtype: str,
        stream_dtype: str,
        activations: str,
        caches: CacheFormats,
        expert: int,
        kv_shards: int,
        context: int,
    ) -> None:
        self.uses = Uses(served=True)
        self._arch = arch
        self._ranks = ranks
        self._expert, self._kv_shards = expert, kv_shards
        # Ranks that divide the heads, and the steps in which they do.
        self._sides: tuple[tuple[int, tuple[str, ...]], ...] = ((ranks, BOTH),)
        if context > 1:
            self._sides = ((ranks // context, (PREFILL,)), *self._sides)
        self._dtype = dtype
        self._caches = caches
        self._rounds_any = activations == "fp8"
        stored = arch.quantisation
        self._group = stored.fp8_block[1]
        self._rounding = (
            self._group,
            "e8m0" if stored.fp8_scale_dtype is DType.F8_E8M0 else "fp32",
        )
        self._streams = HyperCase(
            arch.hc_mult,
            arch.hidden_size,
            arch.hc_sinkhorn_iters,
            arch.hc_eps,
            arch.rms_norm_eps,
            stream_dtype,
            dtype,
        )

    def layer(self, layer: LayerArch) -> None:
        self._sublayer()
        self._attention(layer)
        self._sublayer()
        self._experts(layer)

    def head(self) -> None:
        arch = self._arch
        if self._rounds(arch.hidden_size):
            self.uses.add("hc.expand", self._streams)
        self.uses.add("hc.head", self._streams)
        self._norm(arch.hidden_size)
        self._dense_fp32(arch.vocab_size // self._ranks)

    def index(self) -> None:
        """What `nn.step_index` computes once a step."""
        arch = self._arch
        windows = tuple(Windows(ratio, span) for ratio, span in spans(arch).items())
        widths = arch.rope_head_dim, BLOCK_TOKENS
        case = StepIndexCase(arch.sliding_window, windows, *widths, shards=self._kv_shards)
        self.uses.add("step.index_decode", case, (DECODE,))

    def _sublayer(self) -> None:
        if self._rounds(self._arch.hidden_size):
            joined = ExpandMixFp8Case(self._streams, *self._rounding)
            self.uses.add("hc.expand_mix_fp8", joined)
            return
        self.uses.add("hc.mix", self._streams)
        self.uses.add("hc.expand", self._streams)
        self._norm(self._arch.hidden_size)

    def _attention(self, layer: LayerArch) -> None:
        arch, dtype, uses = self._arch, self._dtype, self.uses
        if layer.kind is not LayerKind.SLIDING:
            self._entries(layer)
        self._stacked((arch.q_lora_rank, arch.head_dim), arch.hidden_size)
        coded = self._linear_coded(arch.q_lora_rank)
        self._norm(arch.q_lora_rank, plain=not coded, coded=coded)
        for ranks, phases in self._sides:
            self._heads(layer, ranks, phases)
        widths, eps = (arch.head_dim, arch.rope_head_dim), arch.rms_norm_eps
        kept = self._caches.latent_format
        if kept == DENSE:
            latents = NormRotateCase(1, *widths, weighted=True, eps=eps, dtype=dtype)
            uses.add("rope.norm_rotate", latents)
            if self._rounds_any:
                write = CacheWriteCase(DENSE, *widths, "rms", eps=eps, dtype=dtype)
                uses.add("cache.write", write, (DECODE,))
        else:
            uses.add("cache.write", CacheWriteCase(kept, *widths, "rms", eps=eps, dtype=dtype))
            uses.add("cache.read", CacheReadCase(kept, dtype), (PREFILL,))

    def _heads(self, layer: LayerArch, ranks: int, phases: tuple[str, ...]) -> None:
        """All that is divided by heads, over so many ranks."""
        arch, dtype, uses = self._arch, self._dtype, self.uses
        heads, kept = arch.num_heads // ranks, self._caches.latent_format
        self._linear(heads * arch.head_dim, arch.q_lora_rank, phases)
        widths = heads, arch.head_dim, arch.rope_head_dim
        queries = NormRotateCase(*widths, weighted=False, eps=arch.rms_norm_eps, dtype=dtype)
        uses.add("rope.norm_rotate", queries, phases)
        attend = AttentionCase(
            heads,
            arch.head_dim,
            arch.sliding_window,
            layer.ratio,
            arch.index_topk if layer.kind is LayerKind.COMPRESSED_SPARSE else 0,
            dtype,
            entry_format=kept if layer.ratio else DENSE,
        )
        uses.add("attention.sparse_prefill", attend, (PREFILL,))
        if DECODE in phases:
            decode = replace(attend, window_format=kept)
            if layer.ratio and self._kv_shards > 1:
                decode, merge = shard_cases(decode, self._kv_shards)
                uses.add("attention.merge", merge, (DECODE,))
            uses.add("attention.sparse_decode", decode, (DECODE,))
        inputs = arch.num_heads * arch.head_dim // arch.o_groups
        self._outputs(heads, arch.o_groups // ranks, inputs, phases)

    def _outputs(self, heads: int, groups: int, inputs: int, phases: tuple[str, ...]) -> None:
        """Inverse rope, and the two products after attention."""
        arch, dtype = self._arch, self._dtype
        widths = heads, arch.head_dim
        shape = groups, arch.o_lora_rank, inputs
        weight_format, block = _stored(arch.quantisation, arch.quantisation.linear)
        if self._linear_coded(arch.head_dim):
            rounded = QuantiseFp8Case(*widths, *self._rounding, arch.rope_head_dim, dtype)
            self.uses.add("quantise.fp8", rounded, phases)
            case = GroupedFp8RowsCase(*shape, block, *self._rounding, dtype)
            self.uses.add("linear.grouped_fp8_rows", case, phases)
        else:
            rotate = RotateCase(*widths, arch.rope_head_dim, inverse=True, dtype=dtype)
            self.uses.add("rope.rotate", rotate, phases)
            plain = GroupedCase(*shape, weight_format, block, dtype)
            self.uses.add("linear.grouped", plain, phases)
        between = groups * arch.o_lora_rank
        if self._linear_coded(between):
            rounded = QuantiseFp8Case(1, between, *self._rounding, dtype=dtype)
            self.uses.add("quantise.fp8", rounded, phases)
        self._linear(arch.hidden_size, between, phases)

    def _entries(self, layer: LayerArch) -> None:
        """Compressors and, where entries are chosen, the indexer."""
        arch = self._arch
        rows = self._compressor(layer, arch.head_dim)
        if self._caches.latent_format != DENSE:
            written = CacheWriteCase(self._caches.latent_format, arch.head_dim, dtype=self._dtype)
            self.uses.add("cache.write", written)
        if layer.kind is LayerKind.COMPRESSED_SPARSE:
            rows += self._compressor(layer, arch.index_head_dim) + arch.index_num_heads
            heads, width, dtype = arch.index_num_heads, arch.index_head_dim, self._dtype
            self._linear(heads * width, arch.q_lora_rank)
            self._index_rows(heads, width)
            keys = self._caches.key_format
            case = IndexCase(heads, width, arch.index_topk, layer.ratio, dtype, keys)
            self.uses.add("attention.index_topk", case, (PREFILL,))
            on_shard = shard_case(case) if self._kv_shards > 1 else decode_case(case)
            self.uses.add("attention.index_topk_decode", on_shard, (DECODE,))
        self._dense_fp32(rows)

    def _index_rows(self, heads: int, width: int) -> None:
        """Index queries, and coded index keys."""
        rope, keys, dtype = self._arch.rope_head_dim, self._caches.key_format, self._dtype
        if keys == DENSE:
            self.uses.add("rope.rotate", RotateCase(heads, width, rope, dtype=dtype))
            return
        self.uses.add("cache.write_index", IndexWriteCase(keys, width, dtype=dtype))
        encode = IndexEncodeCase(keys, heads, width, rope, dtype=dtype)
        self.uses.add("index.encode_queries", encode)

    def _compressor(self, layer: LayerArch, width: int) -> int:
        """Returns the numbers of state per token."""
        arch = self._arch
        overlap = layer.kind is LayerKind.COMPRESSED_SPARSE
        case = CompressCase(
            layer.ratio, width, arch.rope_head_dim, overlap, arch.rms_norm_eps, self._dtype
        )
        self.uses.add("attention.compress", case, (PREFILL,))
        self.uses.add("attention.compress_step", case, (DECODE,))
        return case.row_width

    def _experts(self, layer: LayerArch) -> None:
        arch, dtype, uses = self._arch, self._dtype, self.uses
        route = RouteCase(
            arch.num_experts,
            arch.experts_per_token,
            arch.hidden_size,
            arch.routed_scaling_factor,
            arch.norm_topk_prob,
            dtype,
        )
        name = "moe.route_hash" if layer.router is RouterKind.HASH else "moe.route_learned"
        uses.add(name, route)
        for ranks, phases in self._sides:
            self._shared_expert(arch.moe_intermediate_size // ranks, phases)
        weight_format, block = _stored(arch.quantisation, arch.quantisation.experts)
        # Experts that are dealt are divided over fewer ranks.
        inner = arch.moe_intermediate_size * self._expert // self._ranks
        shape = arch.num_experts // self._expert, arch.experts_per_token, arch.hidden_size, inner
        stored = arch.swiglu_limit, weight_format, block
        coded = weight_format != "dense" and self._rounds(arch.hidden_size) and self._rounds(inner)
        if coded:
            case = ExpertsFp8RowsCase(*shape, *stored, *self._rounding, dtype)
            uses.add("moe.experts_fp8_rows", case)
        else:
            uses.add("moe.experts", ExpertsCase(*shape, *stored, dtype))

    def _shared_expert(self, inner: int, phases: tuple[str, ...]) -> None:
        hidden, limit, dtype = self._arch.hidden_size, self._arch.swiglu_limit, self._dtype
        self._stacked((inner, inner), hidden, phases)
        self._linear(hidden, inner, phases)
        if self._linear_coded(inner):
            coded = SwigluFp8Case(inner, limit, *self._rounding, dtype)
            self.uses.add("moe.swiglu_fp8", coded, phases)
        else:
            self.uses.add("moe.swiglu", SwigluCase(inner, limit, dtype), phases)

    def _rounds(self, width: int) -> bool:
        """Whether rows of `width` are rounded before products with quantised matrices."""
        return self._rounds_any and width % self._group == 0

    def _linear_coded(self, width: int) -> bool:
        """Whether a matrix of attention or of the shared expert reads rows of `width` as codes."""
        return self._arch.quantisation.linear is WeightFormat.FP8_BLOCK and self._rounds(width)

    def _norm(self, width: int, *, plain: bool = True, coded: bool = False) -> None:
        eps, dtype = self._arch.rms_norm_eps, self._dtype
        if coded:
            case = RmsNormFp8Case(width, eps, *self._rounding, normed=plain, dtype=dtype)
            self.uses.add("norm.rms_norm_fp8", case)
        else:
            self.uses.add("norm.rms_norm", RmsNormCase(width, eps, dtype))

    def _dense_fp32(self, rows: int) -> None:
        case = DenseCase(rows, self._arch.hidden_size, self._dtype, out_dtype="float32")
        self.uses.add("linear.dense", case)

    def _stacked(self, rows: Sequence[int], columns: int, phases: tuple[str, ...] = BOTH) -> None:
        """One product for several matrices, unless a block of scales would straddle two."""
        _, (block_rows, _) = _stored(self._arch.quantisation, self._arch.quantisation.linear)
        if any(count % block_rows for count in rows[:-1]):
            for count in rows:
                self._linear(count, columns, phases)
        else:
            self._linear(sum(rows), columns, phases)

    def _linear(self, rows: int, columns: int, phases: tuple[str, ...] = BOTH) -> None:
        quantisation, dtype = self._arch.quantisation, self._dtype
        weight_format, block = _stored(quantisation, quantisation.linear)
        if weight_format == "dense":
            self.uses.add("linear.dense", DenseCase(rows, columns, dtype, out_dtype=dtype), phases)
        elif self._rounds(columns):
            coded = Fp8RowsCase(rows, columns, block, *self._rounding, dtype)
            self.uses.add("linear.fp8_rows", coded, phases)
        else:
            self.uses.add("linear.fp8_block", Fp8BlockCase(rows, columns, block, dtype), phases)


def _stored(quantisation: Quantisation, weights: WeightFormat) -> tuple[str, tuple[int, int]]:
    """How ops see weights of a format: its name, and (rows, columns) that share a scale."""
    if weights is WeightFormat.FP8_BLOCK:
        return "fp8_block", quantisation.fp8_block
    if weights is WeightFormat.FP4_GROUP:
        return "fp4_group", (1, quantisation.fp4_group)
    return "dense", (1, 1)
