"""Work: what one rank computes in one step, as parts whose operations and bytes the ops count.

What tensor parallelism repeats on every rank is counted whole: hyper-connections, norms, routers,
latents, compressors and the indexer. What context parallelism divides is divided: all of it, by
rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from metainfer.arch.attention import AttentionLayer
from metainfer.arch.shapes import EngramShape, ModelShape
from metainfer.ops.attention import DENSE, AttentionCase, row_bytes
from metainfer.ops.base import Cost, Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.compress import CompressCase
from metainfer.ops.hc import HyperCase
from metainfer.ops.index import IndexCase
from metainfer.ops.moe import RouteCase, SwigluFp8Case
from metainfer.ops.norm import AddRmsNormCase, RmsNormFp8Case
from metainfer.ops.quantise import QuantiseFp8Case
from metainfer.ops.rope import NormRotateCase, RotateCase
from metainfer.plan.cost.experts import touched
from metainfer.plan.cost.parts import (
    ATTENTION,
    COPY,
    EXPERTS,
    HEAD,
    INDEXER,
    PRODUCTS,
    SMALL,
    STREAMS,
    Part,
    Share,
    merged,
)
from metainfer.plan.cost.shape import (
    BF16,
    F32,
    FP8,
    WEIGHT_BYTES,
    expert_format,
    linear_format,
    replays_from,
)


def step_work(shape: ModelShape, share: Share) -> tuple[Part, ...]:
    """All parts of one step of one rank, pipeline stages together."""
    counter = _Counter(shape, share)
    found: list[Part] = []
    for layer, count in _kinds_of_layer(shape, share):
        found += [part.times(count) for part in counter.layer(*layer)]
    if shape.engram is not None:
        tables = len(shape.engram.layers)
        found += [part.times(tables) for part in counter.table(shape.engram)]
    found += counter.head()
    return merged(found)


Kind = tuple[AttentionLayer, bool, bool, bool]
"""A layer that stands for all of its kind; whether it has experts, runs short, and writes entries
for all rows though it runs short."""

_does = attrgetter(*(one.name for one in fields(AttentionLayer) if one.name != "index"))
"""What a layer is, without its number."""


def _kinds_of_layer(shape: ModelShape, share: Share) -> list[tuple[Kind, int]]:
    """Layers that do the same, counted."""
    counts: Counter[tuple[Any, bool, bool, bool]] = Counter()
    one_of: dict[Any, AttentionLayer] = {}
    start = replays_from(shape) if share.replays else None
    window = shape.side.window * share.sequences
    trims = start is not None and not share.decode and share.rows > window
    for layer in shape.side.layers:
        short = trims and start is not None and layer.index >= start
        source = short and layer.index == start
        does = _does(layer)
        one_of.setdefault(does, layer)
        counts[does, layer.index >= shape.dense_layers, short, source] += 1
    return [
        ((one_of[does], experts, short, source), count)
        for (does, experts, short, source), count in counts.items()
    ]


class _Counter:
    """Parts of the layers of one share."""

    def __init__(self, shape: ModelShape, share: Share) -> None:
        self._shape = shape
        self._side = shape.side
        self._share = share
        self._rows: float = share.own_rows
        self._expert_rows: float = share.rows
        self._heads = max(1, shape.side.heads // share.tensor)
        self._linear = linear_format(shape)
        self._operands = FP8 if share.coded and self._linear == FP8 else BF16

    def layer(self, layer: AttentionLayer, experts: bool, short: bool, source: bool) -> list[Part]:
        share = self._share
        found: list[Part] = []
        if source:  # entries of all rows, before the rest runs over the window
            found += self._streams(1)
            found += self._entry_products(layer)
            layer = replace(layer, owns_entries=False)
        if short:
            kept = min(share.rows, self._side.window * share.sequences)
            self._rows, self._expert_rows = kept / share.context, kept
        found += self._streams(2)
        found += self._attention(layer)
        found += self._feed_forward(experts)
        self._rows, self._expert_rows = share.own_rows, share.rows
        return found

    def head(self) -> list[Part]:
        """Of the last row of each sequence."""
        shape, share = self._shape, self._share
        rows = share.rows if share.decode else share.sequences
        weight = F32 if self._linear == F32 else BF16
        outputs = shape.vocab_size // share.tensor
        moved = outputs * self._side.hidden_size * WEIGHT_BYTES[weight] + 4.0 * rows * outputs
        flops = 2.0 * rows * outputs * self._side.hidden_size
        return [Part(HEAD, "product bf16", rows, flops, moved, calls=4)]

    def _streams(self, sublayers: int) -> list[Part]:
        """Between the residual streams and the first product of a sublayer."""
        side, streams = self._side, self._side.streams
        norm = RmsNormFp8Case(side.hidden_size, side.eps, side.activation_group)
        found = []
        if streams is None:
            found.append(self._op(SMALL, "norm.add_rms_norm", AddRmsNormCase(side.hidden_size)))
        else:
            case = HyperCase(
                streams.streams,
                side.hidden_size,
                streams.iterations,
                normed=streams.shifted,
            )
            mixes = "hc.mix_shifted" if streams.shifted else "hc.mix"
            found.append(self._op(STREAMS, mixes, case))
            found.append(self._op(STREAMS, "hc.expand", case))
        found.append(self._op(SMALL, "norm.rms_norm_fp8", norm))
        return [part.times(sublayers) for part in found]

    def _attention(self, layer: AttentionLayer) -> list[Part]:
        side, heads = self._side, self._heads
        found = [
            self._product(side.q_rank + side.key_width, side.hidden_size),
            self._product(heads * side.query_width, side.q_rank, divided=heads * side.query_width),
            self._op(SMALL, "norm.rms_norm_fp8", RmsNormFp8Case(side.q_rank)),
        ]
        widths = heads, side.query_width, side.rope_width
        if side.norms_heads:
            found.append(self._op(SMALL, "rope.norm_rotate", NormRotateCase(*widths, False)))
        else:
            found.append(self._op(SMALL, "rope.rotate", RotateCase(*widths)))
        latent = NormRotateCase(1, side.value_width, side.rope_width, True)
        found.append(self._op(SMALL, "rope.norm_rotate", latent))
        if side.absorbed:
            found.append(self._grouped(side.value_width, side.query_width - side.rope_width))
        if layer.owns_entries:
            found += self._entry_products(layer)
        if layer.owns_queries:
            found += self._indexer(layer)
        found += self._attend(layer)
        return found + self._outputs()

    def _entry_products(self, layer: AttentionLayer) -> list[Part]:
        """Compressors, and the keys of the indexer."""
        side, index = self._side, self._side.indexer
        found = []
        rows = 0
        if side.window:
            gates = 2 if layer.ratio > 1 else 1
            rows = gates * side.value_width * (2 if layer.overlap else 1)
            pool = CompressCase(max(2, layer.ratio), side.value_width, 0, layer.overlap)
            name = "attention.compress_decode" if self._share.decode else "attention.compress"
            found.append(self._op(SMALL, name, pool))
        if layer.topk and layer.owns_queries and index.compresses_keys:
            rows += 2 * index.width * (2 if layer.overlap else 1)
        elif layer.topk and layer.owns_queries:
            rows += index.width
        if rows:
            found.append(self._product(rows, side.hidden_size, operands=BF16))
        return found

    def _indexer(self, layer: AttentionLayer) -> list[Part]:
        side, index, share = self._side, self._side.indexer, self._share
        form = index.key_formats[0] if share.coded else DENSE
        case = IndexCase(
            index.heads,
            index.width,
            layer.topk,
            layer.ratio,
            key_format=form,
            candidate_blocks=index.candidate_blocks if layer.publishes or layer.searches else 0,
            candidate_block=index.candidate_block,
            publishes=layer.publishes,
        )
        name = "attention.index_topk_decode" if share.decode else "attention.index_topk"
        cost = self._attending(name, case)
        work = "index bf16" if form == DENSE else "index fp8"
        shards = share.kv_shards if share.decode else 1
        parts, rows = shards * share.scorers, self._rows / share.scorers
        flops = cost.flops / parts
        kept = WEIGHT_BYTES[F32] * flops / (2.0 * index.width)  # a score of each head
        scores = Part(INDEXER, work, rows, flops, cost.bytes / parts, 2, kept)
        queries = self._product(index.heads * index.width, side.q_rank, rows=rows)
        weights = self._product(index.heads, side.hidden_size, operands=BF16, rows=rows)
        codes = self._op(SMALL, "quantise.fp8", QuantiseFp8Case(index.heads, index.width), rows)
        return [scores, queries, weights, codes]

    def _attend(self, layer: AttentionLayer) -> list[Part]:
        side, share = self._side, self._share
        coded = side.entry_format if share.coded and layer.ratio else DENSE
        window = side.window_format if share.coded and side.window else DENSE
        shards = share.kv_shards if share.decode else 1
        case = AttentionCase(
            self._heads,
            side.value_width,
            side.window,
            layer.ratio,
            layer.topk,
            rope_extra=side.rope_extra,
            window_format=window if share.decode else DENSE,
            entry_format=coded,
        )
        if share.decode:
            # Shards have all heads of their ranks over a part of the entries: as many products.
            cost = self._attending("attention.sparse_decode", case)
            return [Part(ATTENTION, "attention bf16", self._rows, cost.flops, cost.bytes / shards)]
        cost = self._attending("attention.sparse_prefill", case)
        pairs = cost.flops / (2.0 * case.heads * (case.key_width + case.width))
        gathered = pairs * row_bytes(DENSE, case.key_width, case.dtype)
        return [
            Part(ATTENTION, "attention bf16", self._rows, cost.flops, cost.bytes, 1, gathered),
        ]

    def _outputs(self) -> list[Part]:
        side, heads, tensor = self._side, self._heads, self._share.tensor
        width = heads * side.output_width
        rounded = QuantiseFp8Case(heads, side.output_width, side.activation_group)
        found = [self._op(SMALL, "quantise.fp8", rounded)]
        if side.absorbed:
            found.append(self._grouped(side.output_width, side.value_width))
        if not side.output_groups:
            return [*found, self._product(side.hidden_size, width, divided=width)]
        groups = max(1, side.output_groups // tensor)
        inputs = side.heads * side.output_width // side.output_groups
        first = self._product(side.output_rank, inputs).times(groups)
        between = groups * side.output_rank
        return [
            *found,
            replace(first, calls=1.0),
            self._product(side.hidden_size, between, divided=between),
        ]

    def _feed_forward(self, experts: bool) -> list[Part]:
        shape, side = self._shape, self._side
        ranks = self._share.tensor * self._share.context
        rows = self._expert_rows
        if not experts:
            inner = shape.dense_width // ranks
            return self._gated(inner, rows)
        route = RouteCase(shape.experts, shape.experts_per_token, side.hidden_size, 1.0)
        found = [self._op(SMALL, "moe.route_learned", route), self._routed()]
        if shape.shared_experts:
            found += self._gated(shape.shared_experts * shape.expert_width // ranks, rows)
        return found

    def _gated(self, inner: int, rows: float) -> list[Part]:
        width = self._side.hidden_size
        act = SwigluFp8Case(max(1, inner), 10.0)
        return [
            self._product(2 * inner, width, divided=inner, rows=rows),
            self._product(width, inner, divided=inner, rows=rows),
            self._op(SMALL, "moe.swiglu_fp8", act, rows=rows),
        ]

    def _routed(self) -> Part:
        """The rank's slices of experts over the rows of all ranks of its group."""
        shape, share = self._shape, self._share
        width, inner = self._side.hidden_size, shape.expert_width / share.slices
        rows = self._expert_rows
        pairs = rows * shape.experts_per_token / share.expert
        if share.expert > 1:
            pairs *= share.skew
        per_expert = 3.0 * width * inner
        read = touched(shape.experts, shape.experts_per_token, rows, share.expert)
        moved = read * per_expert * WEIGHT_BYTES[expert_format(shape)]
        # Inputs of a pair, both halves inside, what is rounded, and what is added up in fp32.
        moved += pairs * (width + 6.0 * inner) + 6.0 * rows * width
        each = pairs / read
        work = f"experts {expert_format(shape)}" if share.coded else "experts bf16"
        return Part(EXPERTS, work, each, 2.0 * pairs * per_expert, moved, 2, width=int(inner))

    def table(self, engram: EngramShape) -> list[Part]:
        """The product after the rows of a table, and the gates of streams."""
        side = self._side
        streams = side.streams.streams if side.streams else 1
        passes = 2.0 * 2 * (2 * streams + 1) * side.hidden_size * self._rows
        return [
            # A key for each stream, and one value.
            self._product((streams + 1) * side.hidden_size, engram.rows_per_token * engram.width),
            Part(STREAMS, COPY, self._rows, 0.0, passes, 2),
        ]

    def _attending(self, name: str, case: Any) -> Cost:
        """What of an op over a cache falls to the rank's rows."""
        share = self._share
        if share.decode:
            return OPS[name].cost(case, Load(max(1, round(self._rows)), share.tokens))
        ran = self._rows * share.context / share.sequences
        cost = OPS[name].cost(case, Load(max(1, round(ran)), share.tokens))
        count = share.sequences / share.context
        return Cost(cost.flops * count, cost.bytes * count)

    def _product(
        self,
        outputs: int,
        inputs: int,
        divided: int = 0,
        operands: str = "",
        rows: float | None = None,
    ) -> Part:
        """One with a matrix [outputs, inputs] of the model's format, or of `operands`."""
        rows = self._rows if rows is None else rows
        size = WEIGHT_BYTES[operands or self._linear]
        kind = operands or self._operands
        moved = outputs * inputs * size + rows * (inputs * (1.0 if kind == FP8 else 2.0))
        moved += 2.0 * rows * outputs
        flops = 2.0 * rows * outputs * inputs
        return Part(PRODUCTS, f"product {kind}", rows, flops, moved, width=divided)

    def _grouped(self, outputs: int, inputs: int) -> Part:
        """A product for each head: keys and values brought to and from the latent's width."""
        one = self._product(outputs, inputs, operands=BF16 if self._operands == BF16 else "")
        return replace(one.times(self._heads), calls=1.0)

    def _op(self, group: str, name: str, case: Any, rows: float | None = None) -> Part:
        """Of an op that moves bytes."""
        rows = self._rows if rows is None else rows
        cost = OPS[name].cost(case, Load(max(1, round(rows))))
        return Part(group, COPY, rows, cost.flops, cost.bytes)
