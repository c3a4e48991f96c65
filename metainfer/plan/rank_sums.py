"""Sums of a rank: what the fullest rank of a layout keeps in memory, line by line.

Weights, caches and rings are sums over what is stored; activations are the bound that the ledger of
one rank has (`plan.ledger`), at the widths of a rank; the rest are bounds and constants of
`plan.overheads`. Stages of a pipeline differ: the lines are of the one that needs most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.arch.shapes import ModelShape
from metainfer.arch.stages import stage_layers
from metainfer.core.errors import UserError
from metainfer.core.units import format_count
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Gpu, Machine
from metainfer.plan.graphs import (
    GRAPH_WORKSPACE_BYTES,
    context_sizes,
    launches_bytes,
    lists_bytes,
    row_sizes,
)
from metainfer.plan.kv_by_rank import StageCaches, blocks_of_rank, stage_caches
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.ledger import GPU_WORKSPACE_BYTES, INDEX_SCRATCH_BYTES
from metainfer.plan.overheads import communication_bytes, context_bytes, host_limit, reserve_bytes
from metainfer.plan.rank_lines import Line, RankLedger
from metainfer.plan.step_bytes import (
    StepWidths,
    attention_bytes,
    experts_bytes,
    logits_bytes,
    step_widths,
    stream_bytes,
)
from metainfer.plan.weights_by_rank import (
    Division,
    Part,
    division,
    stage_weights,
    weight_parts,
)
from metainfer.plan.workload import Workload

_SIZE = 2
"""Bytes of an activation: bf16."""

ENGRAM = "Engram tables"
DISK_CACHE_BYTES = 40 * 2**30
"""Of rows of Engram tables on disk that the host keeps (0xSero/local-ai-registry, pull 55)."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one replica must hold at a time.

    Attributes:
        sequences: that run.
        longest: tokens of the longest of them.
        typical: tokens of the others.
    """

    sequences: int
    longest: int
    typical: int


def demand_of(workload: Workload, layouts: Layouts) -> Demand:
    """Of the replica that has most requests."""
    sequences = -(-workload.requests_at_once // layouts.decode.replicas)
    whole = workload.input_tokens + workload.output_tokens
    return Demand(sequences, workload.longest_context, whole)


class RankSums:
    """Ledgers of models; sums that several layouts share are made once."""

    def __init__(self) -> None:
        self._models: dict[tuple[int, str, str, bool], _Model] = {}

    def of(
        self,
        shape: ModelShape,
        machine: Machine,
        layouts: Layouts,
        demand: Demand,
        formats: Formats,
    ) -> RankLedger:
        """The ledger without a reason. Raises UserError where the machine has too few
        GPUs, and for words that are no formats."""
        key = (id(shape), formats.linear, formats.experts, bool(formats.draft))
        known = self._models.get(key)
        if known is None or known.shape is not shape:
            known = _Model(shape, weight_parts(shape, formats))
            self._models[key] = known
        question = _Question(known, layouts, formats, demand)
        gpu = _smallest(machine, layouts)
        staged = [tuple(question.lines(gpu, stage)) for stage in range(layouts.decode.pipeline)]
        fullest = max(staged, key=lambda lines: sum(line.bytes for line in lines))
        lines = tuple(line for line in fullest if line.bytes)
        host = tuple(question.host_lines())
        return RankLedger(lines, host, gpu.memory_bytes, host_limit(machine))


def _smallest(machine: Machine, layouts: Layouts) -> Gpu:
    gpus = machine.gpus
    if isinstance(gpus, Unknown) or len(gpus) < layouts.gpus:
        there = gpus.why if isinstance(gpus, Unknown) else f"there are {len(gpus)}"
        raise UserError(
            f"the layout {layouts.name} needs {layouts.gpus} GPUs, and {there}",
            hint="name a machine with --machine, or choose a smaller layout",
        )
    return min(gpus[: layouts.gpus], key=lambda gpu: gpu.memory_bytes)


class _Model:
    """A model in one choice of formats of weights."""

    def __init__(self, shape: ModelShape, parts: tuple[Part, ...]) -> None:
        self.shape = shape
        self.parts = parts
        self._weights: dict[tuple[Division, int, int], dict[str, int]] = {}
        self._caches: dict[tuple[str, str, int, int, int], StageCaches] = {}
        self._widths: dict[tuple[int, int, int], StepWidths] = {}
        ratios = [layer.ratio for layer in shape.side.choosers()]
        self.scored_ratio = min(ratios, default=0)
        """Of the layers whose indexer scores most entries; 0 where no layer has one."""

    def widths(self, layout: Layout) -> StepWidths:
        key = (layout.tensor, layout.expert, layout.expert_slices)
        if key not in self._widths:
            self._widths[key] = step_widths(self.shape, *key)
        return self._widths[key]

    def weights(self, cut: Division, stages: int, stage: int) -> dict[str, int]:
        key = (cut, stages, stage)
        if key not in self._weights:
            layers = stage_layers(self.shape.num_layers, stages)
            self._weights[key] = stage_weights(self.shape, self.parts, cut, layers, stage)
        return self._weights[key]

    def caches(self, formats: Formats, draft_rows: int, stages: int, stage: int) -> StageCaches:
        key = (formats.latents, formats.index_keys, draft_rows, stages, stage)
        if key not in self._caches:
            layers = stage_layers(self.shape.num_layers, stages)[stage]
            self._caches[key] = stage_caches(self.shape, formats, draft_rows, layers)
        return self._caches[key]


@dataclass(frozen=True, slots=True)
class _Question:
    """One ledger, while it is made."""

    model: _Model
    layouts: Layouts
    formats: Formats
    demand: Demand

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def draft_rows(self) -> int:
        return self.formats.draft if self.shape.draft is not None else 0

    @property
    def decode_rows(self) -> int:
        return self.demand.sequences * (1 + self.draft_rows)

    def lines(self, gpu: Gpu, stage: int) -> Iterator[Line]:
        """Of one stage, some of 0 bytes."""
        yield from self._weights(stage)
        yield from self._caches(stage)
        yield from self._steps(stage)
        yield from self._graphs(stage)
        layout, side = self.layouts.prefill, self.shape.side
        streams = side.streams.streams if side.streams else 1
        yield Line(
            "communication",
            communication_bytes(layout, self.formats.chunk_rows, side.hidden_size, streams),
            "NCCL's connections, rows of a chunk gathered and reduced",
        )
        yield Line("context, libraries", context_bytes(gpu), "driver, code, stacks, workspaces")
        yield Line("reserve", reserve_bytes(gpu), "what an allocator cannot hand out")

    def host_lines(self) -> Iterator[Line]:
        tables = sum(part.bytes for part in self.model.parts if part.group == ENGRAM)
        if not tables:
            return
        if self.formats.engram == "host":
            yield Line(ENGRAM, tables, "once for all ranks; rows are read over PCIe")
        if self.formats.engram == "disk":
            yield Line("Engram rows", min(tables, DISK_CACHE_BYTES), "kept of the tables on disk")

    def _weights(self, stage: int) -> Iterator[Line]:
        cut = division(self.layouts)
        held = self.model.weights(cut, self.layouts.decode.pipeline, stage)
        for name, size in held.items():
            if name != ENGRAM or self.formats.engram == "gpu":
                yield Line(name, size, _divided(name, cut))

    def _caches(self, stage: int) -> Iterator[Line]:
        layout, demand = self.layouts.decode, self.demand
        caches = self.model.caches(self.formats, self.draft_rows, layout.pipeline, stage)
        each = blocks_of_rank(demand.typical, layout.kv_shards)
        blocks = blocks_of_rank(demand.longest, layout.kv_shards) + (demand.sequences - 1) * each
        plural = "sequence" if demand.sequences == 1 else "sequences"
        others = "" if demand.sequences == 1 else f", the longest of {demand.longest:,} tokens"
        shards = f"; tokens divided over {layout.kv_shards}" if layout.kv_shards > 1 else ""
        tokens = f" of {demand.longest:,} tokens" if demand.sequences == 1 else ""
        growing = f"{demand.sequences} {plural}{tokens}{others}{shards}"
        fixed = f"{demand.sequences} {plural}, on every rank"
        for name, size in caches.lines(blocks, demand.sequences).items():
            yield Line(name, size, growing if name in caches.block_bytes else fixed)

    def _steps(self, stage: int) -> Iterator[Line]:
        layout = self.layouts.prefill
        widths = self.model.widths(layout)
        rows = self.formats.chunk_rows
        own = -(-rows // layout.context)
        # Experts see the rows of all context ranks, which are gathered for them.
        inner = max(attention_bytes(widths, own, _SIZE), experts_bytes(widths, rows, _SIZE))
        of = f"a chunk of {format_count(rows)} rows"
        shared = f", {own:,} a rank" if own != rows else ""
        yield Line("activations", stream_bytes(widths, own, _SIZE) + inner, f"{of}{shared}")
        if stage == layout.pipeline - 1:
            logits = logits_bytes(self.shape.vocab_size, min(rows, self.decode_rows))
            yield Line("logits", logits, f"of {format_count(self.decode_rows)} sampled rows")
        if self.model.scored_ratio:
            why = f"scores of {self._entries():,} entries a row, in slices, and keys in order"
            yield Line("indexer scratch", self._index_scratch(own), why)
        rest = GPU_WORKSPACE_BYTES - INDEX_SCRATCH_BYTES
        yield Line("kernels", rest, "entries decoded for prefill, lists, partial results; a bound")

    def _entries(self) -> int:
        """Entries of the longest sequence that a row's indexer scores on one rank."""
        tokens = blocks_of_rank(self.demand.longest, self.layouts.decode.kv_shards) * BLOCK_TOKENS
        return tokens // self.model.scored_ratio

    def _index_scratch(self, rows: int) -> int:
        keys = self._entries() * self.shape.side.indexer.width
        return min(INDEX_SCRATCH_BYTES, rows * self._entries() * 4 + keys)

    def _graphs(self, stage: int) -> Iterator[Line]:
        layout, side = self.layouts.decode, self.shape.side
        graphs = len(row_sizes(self.decode_rows)) * len(context_sizes(self.demand.longest))
        layers = len(stage_layers(self.shape.num_layers, layout.pipeline)[stage])
        caches = self.model.caches(self.formats, self.draft_rows, layout.pipeline, stage)
        tokens = blocks_of_rank(self.demand.longest, layout.kv_shards) * BLOCK_TOKENS
        lists = lists_bytes({layer.ratio for layer in side.layers}, self.decode_rows, tokens)
        widths = self.model.widths(layout)
        rows = self.decode_rows
        step = stream_bytes(widths, rows, _SIZE)
        step += max(attention_bytes(widths, rows, _SIZE), experts_bytes(widths, rows, _SIZE))
        logits = rows * self.shape.vocab_size * 4 if stage == layout.pipeline - 1 else 0
        spare = caches.sequence + caches.token_block
        total = launches_bytes(graphs, layers) + lists + step + logits + spare
        yield Line(
            "graph pools",
            total + GRAPH_WORKSPACE_BYTES,
            f"{graphs} graphs, lists for the longest context, a spare slot and block",
        )


def _divided(group: str, cut: Division) -> str:
    if group == "routed experts":
        ways = [f"{cut.expert} parts by expert"] if cut.expert > 1 else []
        ways += [f"{cut.expert_slices} by width"] if cut.expert_slices > 1 else []
        return "divided: " + ", ".join(ways) if ways else "whole"
    if group == ENGRAM:
        return f"rows divided over {cut.group}" if cut.group > 1 else "whole"
    if group in ("shared experts", "dense layers", "attention heads", "head"):
        return f"divided over {cut.tensor}" if cut.tensor > 1 else "whole"
    if group == "drafting blocks":
        return "divided as layers are" if cut.group > 1 else "whole"
    return "on every rank" if cut.group > 1 else "whole"
