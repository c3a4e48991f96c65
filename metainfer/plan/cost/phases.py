"""Phases: what a chunk of a prompt and a decode step take in a layout, and where the time goes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.arch.shapes import ModelShape
from metainfer.hardware.machine import Machine
from metainfer.ops.attention import row_bytes
from metainfer.ops.formats import INDEX_FORMATS
from metainfer.plan.cost import experts
from metainfer.plan.cost.constants import INFERRED, Constants, Profile
from metainfer.plan.cost.parts import GROUPS, Share
from metainfer.plan.cost.rates import Rates
from metainfer.plan.cost.shape import FP8, linear_format, replays_from
from metainfer.plan.cost.transfers import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Exchange,
    Transfers,
)
from metainfer.plan.cost.work import step_work
from metainfer.plan.layouts import Formats, Layout

TRANSFERS, HOST, BUBBLES = "transfers", "host", "pipeline"
ALL_GROUPS = (*GROUPS, TRANSFERS, HOST, BUBBLES)


@dataclass(frozen=True, slots=True)
class Item:
    """Time of one kind, and what its rate or bandwidth rests on."""

    group: str
    seconds: float
    origin: str
    why: str


@dataclass(frozen=True, slots=True)
class Step:
    """Time of one step of all stages of a pipeline, one after the other."""

    items: tuple[Item, ...]

    @property
    def seconds(self) -> float:
        return sum(item.seconds for item in self.items)

    def by_group(self) -> dict[str, float]:
        """Groups that take time, in the order of `ALL_GROUPS`."""
        sums = {
            group: sum(item.seconds for item in self.items if item.group == group)
            for group in ALL_GROUPS
        }
        return {group: seconds for group, seconds in sums.items() if seconds > 0}

    def uncertainty(self, constants: Constants) -> float:
        """One standard deviation as a share: what rests on one input errs together, and inputs
        err together in part, for they come from the same sources."""
        weights: dict[tuple[str, str], float] = {}
        for item in self.items:
            key = (item.why, item.origin)
            weights[key] = weights.get(key, 0.0) + item.seconds
        whole = self.seconds or 1.0
        shares = [
            constants.uncertainty[origin] * seconds / whole
            for (_, origin), seconds in weights.items()
        ]
        together = constants.uncertainty["together"]
        alone = sum(share * share for share in shares)
        return math.sqrt(together * sum(shares) ** 2 + (1.0 - together) * alone)


def averaged(steps: Iterable[tuple[float, Step]]) -> Step:
    """Steps weighted; the weights add up to 1."""
    sums: dict[tuple[str, str, str], float] = {}
    for weight, step in steps:
        for item in step.items:
            key = (item.group, item.origin, item.why)
            sums[key] = sums.get(key, 0.0) + weight * item.seconds
    return Step(tuple(Item(g, seconds, o, w) for (g, o, w), seconds in sums.items()))


class Phases:
    """Times of one model on one machine under one engine; equal questions are answered once."""

    def __init__(
        self, shape: ModelShape, machine: Machine, constants: Constants, profile: Profile
    ) -> None:
        self.shape = shape
        self.constants = constants
        self.profile = profile
        self.rates = Rates(machine, constants, profile)
        self.transfers = Transfers(machine, constants, profile)
        self.problem = self.rates.problem or self.transfers.problem
        self._work: dict[Share, tuple[Item, ...]] = {}
        self.gathers_codes = (
            profile.exact_wire and not self.problem and self._coded and linear_format(shape) == FP8
        )

    @property
    def _coded(self) -> bool:
        return self.rates.multiplies_fp8

    def chunk(self, layout: Layout, formats: Formats, rows: int, tokens: int, seqs: int) -> Step:
        """A prefill step of `rows` rows of `seqs` sequences, the last of which sees `tokens`."""
        items = list(self._computed(self._share(layout, rows, tokens, seqs, decode=False)))
        exposed = 1.0 - self.profile.hidden
        for exchange, count in self._prefill_exchanges(layout, formats, rows, tokens, seqs):
            items.append(_item(exchange, count * exposed))
        busy = sum(item.seconds for item in items)
        started = self.profile.launch_us * self._layers_in_full(rows) * 1e-6
        items.append(Item(HOST, max(0.0, started - busy), INFERRED, "kernels started one by one"))
        items.append(Item(HOST, self.profile.chunk_us * 1e-6, INFERRED, "the host, a chunk"))
        items += self._table_rows(layout, formats, rows, sum(item.seconds for item in items))
        return Step(tuple(items))

    def decode(self, layout: Layout, formats: Formats, rows: int, tokens: int) -> Step:
        """A decode step of `rows` sequences of `tokens` tokens in one replica, all stages."""
        stages = layout.pipeline
        each = max(1, math.ceil(rows / stages))
        items = list(self._computed(self._share(layout, each, tokens, each, decode=True)))
        for exchange, count in self._decode_exchanges(layout, each):
            items.append(_item(exchange, count))
        items += self._host_of_step()
        items += self._awaited_rows(layout, formats, each, sum(item.seconds for item in items))
        return Step(tuple(items))

    def _host_of_step(self) -> list[Item]:
        """The host's own work, and kernels that it starts one by one outside of graphs."""
        profile = self.profile
        found = [Item(HOST, profile.step_us * 1e-6, INFERRED, "the host, a step")]
        if profile.layer_us:
            seconds = profile.layer_us * self.shape.num_layers * 1e-6
            found.append(Item(HOST, seconds, INFERRED, "kernels started one by one"))
        return found

    def _share(self, layout: Layout, rows: int, tokens: int, seqs: int, decode: bool) -> Share:
        uneven = experts.skew(
            self.shape.experts, layout.expert, self.constants.kernel("expert_variation")
        )
        return Share(
            rows=rows,
            tokens=tokens,
            sequences=seqs,
            decode=decode,
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            slices=layout.expert_slices,
            kv_shards=layout.kv_shards if decode else 1,
            skew=uneven,
            coded=self._coded,
            replays=self.profile.replays,
            scorers=1 if decode else self._scorers(layout),
        )

    def _scorers(self, layout: Layout) -> int:
        return layout.tensor if self.profile.splits_queries else 1

    def _computed(self, share: Share) -> tuple[Item, ...]:
        known = self._work.get(share)
        if known is None:
            sums: dict[tuple[str, str, str], float] = {}
            for part in step_work(self.shape, share):
                seconds, rate = self.rates.seconds(part, prefill=not share.decode)
                key = (part.group, rate.origin, f"{part.work}: {rate.why}")
                sums[key] = sums.get(key, 0.0) + seconds
            known = self._work[share] = tuple(
                Item(group, seconds, *rest) for (group, *rest), seconds in sums.items()
            )
        return known

    def _groups(self, layout: Layout) -> int:
        return layout.replicas * layout.pipeline

    def _prefill_exchanges(
        self, layout: Layout, formats: Formats, rows: int, tokens: int, seqs: int
    ) -> Iterable[tuple[Exchange, float]]:
        """Exchanges of a chunk, and how many there are of each."""
        side, layers = self.shape.side, self._layers_in_full(rows)
        hidden, groups = side.hidden_size, self._groups(layout)
        whole = 2.0 * rows * hidden
        exchange = self.transfers.exchange
        coded = self.constants.transfer("coded")
        wire = 1.0 if formats.wire == "bf16" else coded
        if layout.tensor > 1:
            # After attention, within the ranks that divide the heads of the same rows.
            part = wire * whole / layout.context
            some = groups * layout.context
            yield exchange(ALL_REDUCE, part, layout.tensor, some), layers
        if layout.context == 1 and layout.tensor > 1:
            yield exchange(ALL_REDUCE, wire * whole, layout.tensor, groups), layers
        elif layout.context > 1:
            codes = coded if self.gathers_codes else wire
            # Strides of the tensor ranks lie apart; the whole group's links are what they share.
            yield exchange(ALL_GATHER, codes * whole, layout.group, groups), layers
            yield exchange(REDUCE_SCATTER, wire * whole, layout.group, groups), layers
            if layout.tensor > 1:
                part = wire * whole / layout.context
                some = groups * layout.context
                yield exchange(ALL_GATHER, part, layout.tensor, some), layers
            yield from self._halo(layout, rows)
        if self._scorers(layout) > 1:
            for layer in side.choosers():
                chosen = 4.0 * rows * layer.topk
                yield exchange(ALL_GATHER, chosen, layout.tensor, groups * layout.context), 1
        if layout.kv_shards > 1:
            # What the chunk itself writes every rank computes or gets with the halo.
            yield from self._gathered_context(layout, max(0, seqs * tokens - rows))
        if layout.pipeline > 1:
            yield self._handed_on(layout, rows), layout.pipeline - 1

    def _table_rows(self, layout: Layout, formats: Formats, rows: int, rest_s: float) -> list[Item]:
        """Rows of n-gram tables, which are known a chunk ahead: what the rest does not hide."""
        if not self._far_tables(formats):
            return []
        seconds = len(self._tables) * self._table_s(layout, formats, rows)
        return [self._waits(formats, max(0.0, seconds - rest_s))]

    def _awaited_rows(
        self, layout: Layout, formats: Formats, rows: int, rest_s: float
    ) -> list[Item]:
        """Of a decode step, whose tokens are known as it begins: each table is read after the one
        before, and hidden by the layers before it alone."""
        if not self._far_tables(formats):
            return []
        latency = self.constants.transfer(f"{formats.engram}_row_us") * 1e-6
        each_s = latency + self._table_s(layout, formats, rows)
        layers, waited = self.shape.num_layers, 0.0
        for number, layer in enumerate(self._tables, start=1):
            reached = rest_s * layer / layers + waited
            waited += max(0.0, number * each_s - reached)
        return [self._waits(formats, waited)]

    @property
    def _tables(self) -> tuple[int, ...]:
        """Layers before which a table of n-grams is read."""
        return () if self.shape.engram is None else self.shape.engram.layers

    def _far_tables(self, formats: Formats) -> bool:
        """Ranks keep rows of their own on GPUs: a gather far smaller than those of activations."""
        return bool(self._tables) and formats.engram != "gpu"

    def _table_s(self, layout: Layout, formats: Formats, rows: int) -> float:
        """Rows of one table for a step: each GPU reads all of them from the host's memory; from
        the disk, which replicas share, they come once for a group."""
        engram = self.shape.engram
        assert engram is not None
        reads = rows * engram.rows_per_token
        if formats.engram == "disk":
            return reads * layout.replicas / self.constants.transfer("disk_reads_per_s")
        return reads * engram.row_bytes / self.transfers.from_host()

    def _waits(self, formats: Formats, seconds: float) -> Item:
        why = f"rows of n-gram tables from {formats.engram}"
        return Item(TRANSFERS, seconds, INFERRED, why)

    @property
    def _streams(self) -> int:
        return self.shape.side.streams.streams if self.shape.side.streams else 1

    def _layers_in_full(self, rows: int) -> float:
        """Layers that all rows of a chunk go through, and what the others add."""
        share = Share(rows, rows, 1, False, 1, 1, 1, 1, replays=self.profile.replays)
        return full_layers(self.shape, share)

    def _halo(self, layout: Layout, rows: int) -> Iterable[tuple[Exchange, float]]:
        """What a rank misses of a chunk whose blocks of tokens are dealt out: of all ranks'
        blocks their entries and index keys; of the block before each of its own, from the rank
        before, the latents that a window sees, and what its last rows give to the first entry of
        this one where entries overlap."""
        side, groups, ranks = self.shape.side, self._groups(layout), layout.context
        blocks = rows / ranks / BLOCK_TOKENS
        if side.window:
            seen = min(side.window, BLOCK_TOKENS)
            latents = seen * self._row_bytes(side.window_format, side.value_width)
            for overlap, count in self._overlaps(rows).items():
                size = blocks * (latents + overlap)
                yield self.transfers.send(size, ranks, groups * layout.tensor), count
        for size, count in self._entry_bytes(rows).items():
            yield self.transfers.exchange(ALL_GATHER, size, ranks, groups), count

    def _overlaps(self, rows: int) -> dict[float, float]:
        """Bytes that the last rows of a block give to an entry of the next, counted over the layers
        that a chunk goes through."""
        through = self._layers_in_full(rows) / self.shape.num_layers
        return {size: count * through for size, count in self._overlapping.items()}

    @cached_property
    def _overlapping(self) -> Counter[float]:
        """Of each layer, in fp32 as compressors add up."""
        side = self.shape.side
        found: Counter[float] = Counter()
        for layer in side.layers:
            width = 0
            if layer.owns_entries and layer.overlap:
                keys = layer.topk and layer.owns_queries and side.indexer.compresses_keys
                width = 2 * (side.value_width + (side.indexer.width if keys else 0))
            found[4.0 * layer.ratio * width] += 1
        return found

    def _gathered_context(self, layout: Layout, tokens: int) -> Iterable[tuple[Exchange, float]]:
        """Of sharded caches, all entries of tokens before a chunk that it sees, layer by layer."""
        groups = self._groups(layout)
        for size, count in self._entry_bytes(tokens).items():
            yield self.transfers.exchange(ALL_GATHER, size, layout.kv_shards, groups), count

    def _entry_bytes(self, tokens: int) -> dict[float, int]:
        """Bytes of entries and index keys of so many tokens, counted over the layers that own
        them."""
        return {each * tokens: count for each, count in self._entries.items()}

    @cached_property
    def _entries(self) -> Counter[float]:
        """Bytes of a token of a layer, counted."""
        side = self.shape.side
        found: Counter[float] = Counter()
        for layer in side.owners():
            each = self._row_bytes(side.entry_format, side.key_width)
            if layer.topk and layer.owns_queries:
                each += self._key_bytes()
            found[each / layer.ratio] += 1
        return found

    def _decode_exchanges(self, layout: Layout, rows: int) -> Iterable[tuple[Exchange, float]]:
        side, groups = self.shape.side, self._groups(layout)
        exchange = self.transfers.exchange
        layers, ranks = len(side.layers), layout.tensor
        size = 2.0 * rows * side.hidden_size
        if ranks > 1:
            yield exchange(ALL_REDUCE, size, ranks, groups), 2 * layers
            yield exchange(ALL_GATHER, 4.0 * rows * self.shape.vocab_size, ranks, groups), 1
        if layout.kv_shards > 1:
            shards = layout.kv_shards
            heads = side.heads / ranks * shards
            queries = 2.0 * rows * heads * side.key_width
            results = 2.0 * rows * heads * (side.value_width + 2)
            yield exchange(ALL_GATHER, queries, shards, groups * ranks // shards), layers
            yield exchange(REDUCE_SCATTER, results, shards, groups * ranks // shards), layers
            chosen = 8.0 * rows * shards * max((one.topk for one in side.choosers()), default=0)
            yield (
                exchange(ALL_GATHER, chosen, shards, groups * ranks // shards),
                len(side.choosers()),
            )
        if layout.pipeline > 1:
            yield self._handed_on(layout, rows), layout.pipeline - 1

    def _handed_on(self, layout: Layout, rows: int) -> Exchange:
        """The streams of a step's rows, to the next stage."""
        size = 2.0 * rows * self.shape.side.hidden_size * self._streams
        return self.transfers.send(size, layout.group * layout.pipeline, layout.replicas)

    def _row_bytes(self, form: str, width: int) -> float:
        return row_bytes(form if self._coded else "dense", width, "bfloat16")

    def _key_bytes(self) -> float:
        index = self.shape.side.indexer
        if not self._coded or index.key_formats[0] == "dense":
            return 2.0 * index.width
        form = INDEX_FORMATS[index.key_formats[0]]
        return form.code_bytes + form.scale_bytes


def full_layers(shape: ModelShape, share: Share) -> float:
    """Layers, those that run over a window of a chunk's rows alone counted by that share."""
    start = replays_from(shape) if share.replays else None
    window = shape.side.window * share.sequences
    if start is None or share.rows <= window:
        return float(shape.num_layers)
    return start + (shape.num_layers - start) * window / share.rows


def _item(exchange: Exchange, count: float) -> Item:
    why = f"{exchange.means}: {exchange.why}"
    return Item(TRANSFERS, exchange.seconds * count, exchange.origin, why)
